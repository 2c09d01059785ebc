//! The tensors of a quantised module, and their checks.

use crate::safetensors_file::{SafetensorsFiles, SafetensorsTensor};
use dsrun_core::{GroupSize, ScaleType};

/// What is wrong with a matrix, for the end of a message.
pub(super) type Result<T> = std::result::Result<T, String>;

/// The parts of a module in the files.
#[derive(Clone, Copy)]
pub(super) struct Parts<'a> {
    pub(super) files: &'a SafetensorsFiles,
    pub(super) module: &'a str,
}

impl<'a> Parts<'a> {
    pub(super) fn find(self, part: &str) -> Option<SafetensorsTensor<'a>> {
        self.files.tensor(&format!("{}.{part}", self.module))
    }

    pub(super) fn name(self, part: &str) -> String {
        format!("{}.{part}", self.module)
    }

    /// The sizes of a part, which must be a matrix of this element type.
    pub(super) fn matrix(self, part: &str, dtype: &str) -> Result<[usize; 2]> {
        let tensor = self.find(part).ok_or_else(|| format!("it has no {part}"))?;
        if tensor.dtype != dtype {
            return Err(format!("{part} is {}, not {dtype}", tensor.dtype));
        }
        let two: Option<[usize; 2]> = tensor.shape.try_into().ok();
        two.filter(|sizes| !sizes.contains(&0))
            .ok_or_else(|| format!("{part} has shape {:?}, not that of a matrix", tensor.shape))
    }

    /// The element type of scales.
    pub(super) fn scale_type(self, part: &str) -> Result<ScaleType> {
        let tensor = self.find(part).ok_or_else(|| format!("it has no {part}"))?;
        match tensor.dtype.as_str() {
            "F32" => Ok(ScaleType::F32),
            "F16" => Ok(ScaleType::F16),
            "BF16" => Ok(ScaleType::BF16),
            other => Err(format!("{part} is {other}, not a float")),
        }
    }

    /// Whole numbers, if the tensor is there.
    pub(super) fn integers(self, part: &str) -> Result<Option<Vec<i64>>> {
        let Some(tensor) = self.find(part) else { return Ok(None) };
        let integers = self.files.integers(tensor.name);
        integers.map(Some).ok_or_else(|| format!("{part} is {}, not a list of whole numbers", tensor.dtype))
    }

    /// The group of each input, if they are not in the order of their groups.
    pub(super) fn order(self, part: &str, group: usize, inputs: usize) -> Result<Option<Vec<u32>>> {
        let Some(order) = self.integers(part)? else { return Ok(None) };
        if order.len() != inputs {
            return Err(format!("{part} is of {} inputs, the matrix has {inputs}", order.len()));
        }
        // Some tools write -1 for "in order".
        let in_order = |(input, found): (usize, &i64)| usize::try_from(*found) == Ok(input / group);
        if order.iter().all(|found| *found == -1) || order.iter().enumerate().all(in_order) {
            return Ok(None);
        }
        let groups = inputs / group;
        let checked = order.iter().map(|found| {
            let found = u32::try_from(*found).ok().filter(|found| (*found as usize) < groups);
            found.ok_or_else(|| format!("{part} names a group that is none of {groups}"))
        });
        checked.collect::<Result<_>>().map(Some)
    }
}

/// How many inputs share a scale, when `groups` of them make up all inputs.
pub(super) fn group_of(inputs: usize, groups: usize) -> Result<usize> {
    match inputs.is_multiple_of(groups) {
        true => Ok(inputs / groups),
        false => Err(format!("its {inputs} inputs are not {groups} whole groups")),
    }
}

/// The groups of rows as they are read: scales of larger groups are repeated.
pub(super) fn group_size(group: usize, inputs: usize) -> Result<GroupSize> {
    if group == inputs {
        return Ok(GroupSize::Row);
    }
    let sizes = [GroupSize::Of128, GroupSize::Of64, GroupSize::Of32];
    let found =
        sizes.into_iter().find(|size| size.columns().is_some_and(|columns| group.is_multiple_of(columns)));
    found.ok_or_else(|| {
        format!("groups of {group} inputs cannot be used; multiples of 32, and all inputs, can")
    })
}
