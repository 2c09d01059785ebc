//! compressed-tensors: `weight_packed` and `weight_shape`, or `weight` in bytes; `weight_scale`; perhaps
//! `weight_zero_point` and `weight_g_idx`.

use super::{
    matrix::{Integers, Matrix, Scales, ZeroWords, Zeros, field_order},
    parts::{Parts, Result, group_of},
};
use dsrun_core::GroupBits;

pub(super) fn matrix(parts: Parts<'_>, quantises_inputs: bool) -> Result<Matrix> {
    let packed = parts.find("weight_packed").is_some();
    let (bits, [outputs, inputs]) = match packed {
        true => packed_sizes(parts)?,
        false => (GroupBits::Eight, parts.matrix("weight", "I8")?),
    };
    let scale = parts.scale_type("weight_scale")?;
    let shape = parts.find("weight_scale").map_or(&[][..], |tensor| tensor.shape);
    let (scales, groups) = match *shape {
        [rows, groups] if rows == outputs && groups > 0 => (Scales::Rows(parts.name("weight_scale")), groups),
        [] | [1] | [1, 1] => (Scales::One(parts.name("weight_scale")), 1),
        _ => return Err(format!("weight_scale has shape {shape:?}, which does not fit {outputs} outputs")),
    };
    let zeros = zeros(parts, bits, outputs, groups)?;
    let integers = if packed { "weight_packed" } else { "weight" };
    let others = ["weight_shape", "weight_g_idx"].into_iter().filter_map(|part| parts.find(part));
    let group = group_of(inputs, groups)?;
    let matrix = Matrix {
        outputs,
        inputs,
        bits,
        integers: Integers::Rows(parts.name(integers)),
        signed: !packed,
        scales,
        scale,
        group,
        symmetric: zeros.is_none(),
        zeros,
        order: parts.order("weight_g_idx", group, inputs)?,
        other_parts: others.map(|tensor| tensor.name.to_owned()).collect(),
        quantises_inputs,
        weight_type: Matrix::UNTYPED,
    }
    .typed()?;
    if quantises_inputs && !matrix.is_channelwise_int8() {
        let format = matrix.weight_type().format;
        return Err(format!(
            "its inputs are quantised, which needs a signed byte for each weight and a scale for each \
                            output; it is {format}"
        ));
    }
    Ok(matrix)
}

fn packed_sizes(parts: Parts<'_>) -> Result<(GroupBits, [usize; 2])> {
    let [rows, words] = parts.matrix("weight_packed", "I32")?;
    let shape = parts.integers("weight_shape")?.ok_or("it has no weight_shape")?;
    let [outputs, inputs] = shape[..] else {
        return Err(format!("weight_shape is {shape:?}, not two sizes"));
    };
    let inputs = usize::try_from(inputs).unwrap_or(0);
    let fits = |bits: &GroupBits| {
        inputs > 0 && inputs.checked_mul(bits.bits()).map(|bits| bits.div_ceil(32)) == Some(words)
    };
    let bits = GroupBits::ALL.into_iter().find(fits).filter(|_| usize::try_from(outputs) == Ok(rows));
    match bits {
        Some(bits) => Ok((bits, [rows, inputs])),
        None => {
            Err(format!("weight_packed {:?} is not {shape:?} (weight_shape) at 4 or 8 bits", [rows, words]))
        }
    }
}

fn zeros(parts: Parts<'_>, bits: GroupBits, outputs: usize, groups: usize) -> Result<Option<Zeros>> {
    let Some(tensor) = parts.find("weight_zero_point") else { return Ok(None) };
    let (shape, name) = (tensor.shape, tensor.name.to_owned());
    let words = outputs.div_ceil(32 / bits.bits());
    match (tensor.dtype.as_str(), shape) {
        ("I32", &[found, of]) if (found, of) == (words, groups) => Ok(Some(Zeros::Words {
            tensor: name,
            words: ZeroWords::OutputsInColumn,
            order: field_order(bits),
            add: 0,
        })),
        ("I8", &[found, of]) if (found, of) == (outputs, groups) => {
            Ok(Some(Zeros::Bytes { tensor: name, bits }))
        }
        (dtype, _) => Err(format!(
            "weight_zero_point is {dtype} {shape:?}, which does not fit {outputs} outputs and {groups} groups"
        )),
    }
}
