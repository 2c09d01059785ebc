//! Describes a program's calls and weights to a device, and the sizes of its states.

use super::{
    bucket::{Bucket, FixedSizes},
    mesh_rank::MeshRank,
    step_interface::StepSize,
};
use crate::error::Result;
use dsrun_core::{
    Error, Size, TensorDesc, WeightType,
    checked::ValidCall,
    kernels::{CallDesc, OperandDesc, WeightDesc},
    op::OperandType,
    program::{Call, Program, Value, ValueId},
};
/// Describes a call of a program at the sizes of a bucket. Collectives run over the groups of `mesh`.
///
/// # Errors
/// If a size has no value or the call is not valid.
pub(crate) fn describe_call(
    program: &Program,
    call: &Call,
    sizes: &dyn Fn(&str) -> Option<usize>,
    mesh: Option<&MeshRank>,
) -> Result<ValidCall, Error> {
    let tensor = |id: ValueId| {
        let value = program.value(id)?;
        let tensor = value.tensor_type().ok_or_else(|| Error::internal(format!("{id} is not a tensor")))?;
        let desc = TensorDesc::dense(tensor.dtype, &tensor.resolve(sizes)?);
        let bounded = matches!(tensor.shape.first(), Some(Size::Bounded(_)));
        Ok(if bounded { desc.with_extent() } else { desc })
    };
    let operand = |id: ValueId| -> Result<OperandDesc, Error> {
        Ok(match &program.value(id)?.value_type {
            OperandType::Weight(weight) => OperandDesc::Weight(weight.clone()),
            OperandType::Tensor(_) => OperandDesc::Tensor(tensor(id)?),
        })
    };
    let operands = call.operands.iter().map(|id| id.map(operand).transpose()).collect::<Result<_, _>>()?;
    let results = call.results.iter().map(|id| tensor(*id)).collect::<Result<_, Error>>()?;
    let comm = call.op.mesh_axis().and_then(|axis| mesh?.comm(axis)).cloned();
    CallDesc { op: call.op.clone(), operands, results, comm }.validate()
}

/// Describes every call of a program at the sizes of a bucket.
///
/// # Errors
/// If a size has no value or a call is not valid.
pub(crate) fn describe(
    program: &Program,
    sizes: &dyn Fn(&str) -> Option<usize>,
    mesh: Option<&MeshRank>,
) -> Result<Vec<ValidCall>, Error> {
    program.nodes.iter().map(|node| describe_call(program, &node.call, sizes, mesh)).collect()
}

/// Describes a weight of a model as constant: it is never written again after packing.
pub(crate) fn weight_desc(weight: &WeightType) -> WeightDesc {
    WeightDesc { weight_type: weight.clone(), immutable: true }
}

/// The bytes of a state.
///
/// # Errors
/// If a size has no value, or the size overflows.
pub(crate) fn state_bytes(value: &Value, limits: Bucket, fixed: FixedSizes) -> Result<usize> {
    let tensor =
        value.tensor_type().ok_or_else(|| Error::internal("a state is not a tensor").at(&value.name))?;
    let shape = tensor.resolve(&limits.sizes(fixed))?;
    let bytes = shape.iter().try_fold(tensor.dtype.bytes(), |bytes, size| bytes.checked_mul(*size));
    let overflow = || Error::invalid(format!("the bytes of shape {shape:?} overflow")).at(&value.name);
    Ok(bytes.ok_or_else(overflow)?)
}

/// Whether a state is a key or value cache, that is, has a row for each page.
pub(crate) fn is_cache(value: &Value) -> bool {
    StepSize::of_rows(value) == Some(StepSize::Pages)
}

/// Whether a state holds activations of a step: the receive buffers of a pipeline stage have a row for each token.
pub(super) fn is_activation(value: &Value) -> bool {
    StepSize::of_rows(value) == Some(StepSize::Tokens)
}
