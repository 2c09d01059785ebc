//! The operands and results of a call by index, and the kernels' names of their types.

use dsrun_core::{
    DType, Error, Result, TensorDesc, WeightType,
    kernels::{CallDesc, OperandDesc},
};

/// The name of an element type in the kernels.
pub(crate) fn type_name(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F16 => Ok("f16"),
        DType::BF16 => Ok("bf16"),
        other => Err(Error::internal(format!("{other} is not a float type"))),
    }
}

/// The kernels' name of a type with elements of this many bytes, for copies.
pub(super) fn bits_of(bytes: usize) -> Result<&'static str> {
    match bytes {
        1 => Ok("u8"),
        2 => Ok("u16"),
        4 => Ok("u32"),
        other => Err(Error::internal(format!("no element has {other} bytes"))),
    }
}

/// The tensor operand at `index`.
pub(super) fn operand(call: &CallDesc, index: usize) -> Result<&TensorDesc> {
    call.tensor(index).ok_or_else(|| Error::internal(format!("operand {index} is not a tensor")))
}

/// The type of the packed weight at `index`.
pub(super) fn weight_type(call: &CallDesc, index: usize) -> Result<&WeightType> {
    match call.operands.get(index) {
        Some(Some(OperandDesc::Weight(weight))) => Ok(weight),
        _ => Err(Error::internal(format!("operand {index} is not a weight"))),
    }
}

/// The result at `index`.
pub(super) fn result(call: &CallDesc, index: usize) -> Result<&TensorDesc> {
    call.results.get(index).ok_or_else(|| Error::internal(format!("there is no result {index}")))
}

/// The type name of the tensor operand at `index`.
pub(super) fn type_of(call: &CallDesc, index: usize) -> Result<&'static str> {
    type_name(operand(call, index)?.dtype)
}

/// Same as [`type_of`], for an optional operand. If it is absent, any type will do: that of the first operand, which present ones
/// mostly have, so that one kernel serves both.
pub(super) fn type_or_first(call: &CallDesc, index: usize) -> Result<&'static str> {
    call.tensor(index).map_or_else(|| type_of(call, 0), |tensor| type_name(tensor.dtype))
}
