//! How a matrix is laid out in tensors, and rows turned into them.

use super::{
    Result,
    file::{Element, SafetensorsWriter, Stored},
};
use dsrun_core::{DType, GroupBits, GroupFormat, GroupOffset, GroupRow, GroupSize, WeightType};

/// The tensors that a weight becomes.
#[derive(Clone, Debug)]
pub(super) enum MatrixLayout {
    /// One.
    Dense { suffix: &'static str, dtype: DType, shape: Vec<usize> },
    /// Integers, scales, perhaps zero points, as compressed-tensors lays them out.
    Group(GroupLayout),
}

/// The parts of a quantised matrix.
#[derive(Clone, Debug)]
pub(super) struct GroupLayout {
    pub(super) format: GroupFormat,
    row: GroupRow,
    outputs: usize,
    inputs: usize,
    /// Whether integers are signed bytes in a tensor `weight`, as where inputs are quantised; else they are packed in words.
    pub(super) bytes: bool,
}

impl MatrixLayout {
    /// The parts of a matrix of a group-wise format; else the reason why there are none.
    pub(super) fn of_group(
        format: GroupFormat,
        weight: &WeightType,
        quantises_inputs: bool,
    ) -> std::result::Result<Self, &'static str> {
        if format.offset == GroupOffset::Minimum {
            return Err("compressed-tensors has no minima; use a symmetric format, or zero points");
        }
        let (outputs, inputs) = (weight.rows(), weight.columns());
        let row = format.row(inputs).ok_or("its columns are no whole groups")?;
        Ok(Self::Group(GroupLayout { format, row, outputs, inputs, bytes: quantises_inputs }))
    }

    /// What people call it.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Dense { dtype, .. } => dtype.to_string(),
            Self::Group(layout) if layout.bytes => format!("{} (w8a8)", layout.format),
            Self::Group(layout) => layout.format.to_string(),
        }
    }

    /// The tensors of a module.
    pub(super) fn tensors(&self, module: &str) -> Vec<Stored> {
        let tensor = |suffix: &str, element, shape: &[usize]| Stored {
            name: format!("{module}.{suffix}"),
            element,
            shape: shape.to_vec(),
        };
        match self {
            Self::Dense { suffix, dtype, shape } => vec![tensor(suffix, Element::Of(*dtype), shape)],
            Self::Group(layout) => {
                let GroupLayout { outputs, inputs, ref row, format, bytes } = *layout;
                let mut tensors = match bytes {
                    true => vec![tensor("weight", Element::Of(DType::I8), &[outputs, inputs])],
                    false => vec![
                        tensor("weight_packed", Element::Of(DType::I32), &[outputs, layout.words()]),
                        tensor("weight_shape", Element::I64, &[2]),
                    ],
                };
                tensors.push(tensor(
                    "weight_scale",
                    Element::Of(format.scale.dtype()),
                    &[outputs, row.groups],
                ));
                if format.offset == GroupOffset::ZeroPoint {
                    let words = outputs.div_ceil(layout.per_word());
                    tensors.push(tensor("weight_zero_point", Element::Of(DType::I32), &[words, row.groups]));
                }
                tensors
            }
        }
    }

    /// Turns rows into the tensors of a module.
    pub(super) fn encoder<'a>(&'a self, module: &'a str) -> Encoder<'a> {
        let zeros = match self {
            Self::Group(layout) if layout.format.offset == GroupOffset::ZeroPoint => {
                vec![0; layout.outputs.div_ceil(layout.per_word()) * layout.row.groups]
            }
            _ => Vec::new(),
        };
        Encoder { layout: self, module, zeros }
    }
}

impl GroupLayout {
    fn per_word(&self) -> usize {
        32 / self.format.bits.bits()
    }

    /// Words of a row.
    fn words(&self) -> usize {
        self.inputs.div_ceil(self.per_word())
    }

    /// Inputs that share a scale; `None` for all.
    pub(super) fn group(&self) -> Option<usize> {
        match self.format.group {
            GroupSize::Row => None,
            _ => Some(self.row.columns),
        }
    }
}

/// Writes a matrix piece by piece.
pub(super) struct Encoder<'a> {
    layout: &'a MatrixLayout,
    module: &'a str,
    /// Words of zero points, collected until the end: a word has those of several outputs.
    zeros: Vec<u32>,
}

impl Encoder<'_> {
    fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.module)
    }

    /// Writes rows from `first` on; gives the bytes written.
    pub(super) fn rows(&mut self, file: &mut SafetensorsWriter, first: usize, bytes: &[u8]) -> Result<u64> {
        let layout = match self.layout {
            MatrixLayout::Dense { suffix, dtype, shape } => {
                let row_bytes = shape.last().copied().unwrap_or(1) * dtype.bytes();
                return file.put(&self.name(suffix), (first * row_bytes) as u64, bytes);
            }
            MatrixLayout::Group(layout) => layout,
        };
        let GroupLayout { row, format, inputs, .. } = layout;
        let line_bytes = if layout.bytes { *inputs } else { layout.words() * 4 };
        // Packed bytes are counted from the least; ours are signed where the format is symmetric.
        let flip = match (format.bits, format.offset) {
            (GroupBits::Eight, GroupOffset::Symmetric) if !layout.bytes => 0x80,
            _ => 0,
        };
        let mut integers = Vec::with_capacity(bytes.len());
        let mut scales = Vec::new();
        for (index, bytes) in bytes.chunks_exact(row.bytes).enumerate() {
            integers.extend(bytes[row.integers.clone()].iter().map(|byte| byte ^ flip));
            integers.resize((index + 1) * line_bytes, 0);
            scales.extend_from_slice(&bytes[row.scales.clone()]);
            if format.offset == GroupOffset::ZeroPoint {
                let output = first + index;
                let shift = output % layout.per_word() * format.bits.bits();
                let words = &mut self.zeros[output / layout.per_word() * row.groups..][..row.groups];
                for (word, zero) in words.iter_mut().zip(&bytes[row.offsets.clone()]) {
                    *word |= u32::from(*zero) << shift;
                }
            }
        }
        let of_integers = if layout.bytes { "weight" } else { "weight_packed" };
        let written = file.put(&self.name(of_integers), (first * line_bytes) as u64, &integers)?;
        let at = first * row.scales.len();
        Ok(written + file.put(&self.name("weight_scale"), at as u64, &scales)?)
    }

    /// Writes what is known only now; gives the bytes written.
    pub(super) fn finish(self, file: &mut SafetensorsWriter) -> Result<u64> {
        let MatrixLayout::Group(layout) = self.layout else { return Ok(0) };
        let mut written = 0;
        if !layout.bytes {
            let shape = [layout.outputs as i64, layout.inputs as i64].map(i64::to_le_bytes);
            written += file.put(&self.name("weight_shape"), 0, shape.as_flattened())?;
        }
        if !self.zeros.is_empty() {
            let words: Vec<u8> = self.zeros.iter().flat_map(|word| word.to_le_bytes()).collect();
            written += file.put(&self.name("weight_zero_point"), 0, &words)?;
        }
        Ok(written)
    }
}
