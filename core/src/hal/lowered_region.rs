//! Running a region as its body, call by call: for a device without a kernel for it, or as the reference for one with a kernel.

use crate::{
    Error, Result,
    checked::{CheckedPlan, ValidArguments, ValidCall},
    device::{BufferSlice, Stream},
    kernels::{Argument, Arguments, Binding, BoundCall, CallDesc, OperandDesc, Plan},
    op::{Op, OperandType},
    region::Region,
    tensor::{Size, TensorDesc, TensorType},
};
use std::sync::Arc;

/// The plan of a region as the plans of its body. Values inside of the region are in the workspace, each in a place of its own.
#[derive(Debug)]
pub struct LoweredPlan {
    call: ValidCall,
    region: Arc<Region>,
    plans: Vec<CheckedPlan>,
    /// The results of the body's calls, in order.
    values: Vec<Value>,
    /// Bytes of the values in the workspace. The workspace of the body's calls follows them.
    values_bytes: usize,
    /// Bytes of the workspace that the calls of the body share.
    shared_bytes: usize,
}

/// A result of a call of the body.
#[derive(Clone, Debug)]
struct Value {
    desc: TensorDesc,
    place: Place,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// The storage of another value, which the call updates.
    Updates(usize),
    /// The storage of a result of the region.
    Result(usize),
    /// The byte of the workspace at which the value begins.
    Workspace(usize),
}

impl LoweredPlan {
    /// Plans the body of a region. `plan` plans each call; values begin at multiples of `alignment` bytes in the workspace.
    ///
    /// # Errors
    /// [`crate::Code::InvalidArgument`] if the call is not a region; [`crate::Code::Unsupported`] if operands of one call of the
    /// body are bounded differently; if a call of the body is not valid; the errors of `plan`.
    pub fn new(
        call: &ValidCall,
        alignment: usize,
        plan: &mut dyn FnMut(ValidCall) -> Result<CheckedPlan>,
    ) -> Result<Self> {
        let Op::Region(region) = &call.op else { return Err(Error::invalid("must be a region")) };
        // Until extents are bound, bounded sizes of the same length count as the same.
        let types = value_types(region, call, |_, desc| desc.bounded.then(|| first_size(desc)))?;
        let mut descs = call.operands.clone();
        let (mut plans, mut values, mut values_bytes) = (Vec::new(), Vec::new(), 0);
        for inner in region.calls() {
            let first = values.len();
            for (index, id) in inner.results.iter().enumerate() {
                let updated = inner.op.updates(index).and_then(|operand| *inner.operands.get(operand)?);
                let outer = region.results().iter().position(|result| result == id);
                let value = if let Some(updated) = updated {
                    let Some(Some(OperandDesc::Tensor(desc))) = descs.get(updated.index()) else {
                        return Err(Error::internal(format!("{updated} is updated, but is not a tensor")));
                    };
                    Value { desc: desc.clone(), place: Place::Updates(updated.index()) }
                } else if let Some((outer, desc)) = outer.zip(outer.and_then(|outer| call.results.get(outer)))
                {
                    Value { desc: desc.clone(), place: Place::Result(outer) }
                } else {
                    let desc = described(types.get(id.index()))?;
                    let value = Value { place: Place::Workspace(values_bytes), desc };
                    values_bytes = (values_bytes + value.desc.bytes()?).next_multiple_of(alignment.max(1));
                    value
                };
                descs.push(Some(OperandDesc::Tensor(value.desc.clone())));
                values.push(value);
            }
            let operands = inner.operands.iter().map(|id| descs.get((*id)?.index())?.clone()).collect();
            let results = values[first..].iter().map(|value| value.desc.clone()).collect();
            let comm = inner.op.mesh_axis().and(call.comm.clone());
            let call = CallDesc { op: inner.op.clone(), operands, results, comm };
            plans.push(plan(call.validate()?)?);
        }
        let shared_bytes = plans.iter().map(CheckedPlan::workspace_bytes).max().unwrap_or(0);
        let (call, region) = (call.clone(), region.clone());
        Ok(Self { call, region, plans, values, values_bytes, shared_bytes })
    }

    /// Where the extents of the body's values are, operands first: those of the bounded sizes they have.
    fn extents(&self, arguments: &Arguments) -> Result<Vec<Option<BufferSlice>>> {
        let mut distinct: Vec<&BufferSlice> = Vec::new();
        let types = value_types(&self.region, &self.call, |index, desc| {
            let Some(Some(Argument::Tensor(binding))) = arguments.operands.get(index) else { return None };
            let Some(extent) = &binding.extent else { return desc.bounded.then(|| "all".to_owned()) };
            let known = distinct.iter().position(|known| known.same(extent));
            Some(known.unwrap_or_else(|| {
                distinct.push(extent);
                distinct.len() - 1
            }))
            .map(|index| index.to_string())
        })?;
        let extent = |value: &Option<OperandType>| match value {
            Some(OperandType::Tensor(tensor)) => match tensor.shape.first() {
                Some(Size::Bounded(index)) => {
                    index.parse().ok().and_then(|index: usize| distinct.get(index).copied().cloned())
                }
                _ => None,
            },
            _ => None,
        };
        Ok(types.iter().map(extent).collect())
    }
}

impl Plan for LoweredPlan {
    fn workspace_bytes(&self) -> usize {
        self.values_bytes + self.shared_bytes
    }

    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        let arguments = arguments.arguments();
        let none = || Error::internal("a region is bound without its workspace");
        let workspace = |start: usize, bytes: usize| match &arguments.workspace {
            Some(workspace) => workspace.slice(start, bytes),
            None => Err(none()),
        };
        let extents = self.extents(arguments)?;
        let mut bound = arguments.operands.clone();
        let mut made = self.values.iter();
        let mut calls = Vec::new();
        for (plan, inner) in self.plans.iter().zip(self.region.calls()) {
            let operands = inner.operands.iter().map(|id| bound.get((*id)?.index())?.clone()).collect();
            let mut results = Vec::new();
            for Value { desc, place } in made.by_ref().take(inner.results.len()) {
                let binding = match *place {
                    Place::Updates(value) => match bound.get(value) {
                        Some(Some(Argument::Tensor(binding))) => binding.clone(),
                        _ => {
                            return Err(Error::internal(format!("%{value} is updated, but is not a tensor")));
                        }
                    },
                    Place::Result(index) => arguments
                        .results
                        .get(index)
                        .cloned()
                        .ok_or_else(|| Error::internal("a result is not bound"))?,
                    Place::Workspace(start) => Binding {
                        slice: workspace(start, desc.bytes()?)?,
                        extent: extents.get(bound.len()).cloned().flatten().filter(|_| desc.bounded),
                    },
                };
                bound.push(Some(Argument::Tensor(binding.clone())));
                results.push(binding);
            }
            let needed = plan.workspace_bytes();
            let workspace = if needed == 0 { None } else { Some(workspace(self.values_bytes, needed)?) };
            calls.push(plan.bind(&Arguments { operands, results, workspace })?);
        }
        Ok(Box::new(LoweredCall { calls }))
    }
}

/// The calls of a region's body, bound.
#[derive(Debug)]
struct LoweredCall {
    calls: Vec<Box<dyn BoundCall>>,
}

impl BoundCall for LoweredCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        self.calls.iter().try_for_each(|call| call.enqueue(stream))
    }
}

/// The types of all values of a region's body, operands first. `name` names the bounded first size of an operand, if it is
/// bounded; values computed from it have the same.
fn value_types(
    region: &Region,
    call: &CallDesc,
    mut name: impl FnMut(usize, &TensorDesc) -> Option<String>,
) -> Result<Vec<Option<OperandType>>> {
    let one = |(index, operand): (usize, &Option<OperandDesc>)| {
        Some(match operand.as_ref()? {
            OperandDesc::Weight(weight) => OperandType::Weight(weight.clone()),
            OperandDesc::Tensor(desc) => {
                let mut tensor = desc.tensor_type();
                if let (Some(name), Some(first)) = (name(index, desc), tensor.shape.first_mut()) {
                    *first = Size::bounded(&name);
                }
                OperandType::Tensor(tensor)
            }
        })
    };
    let operands: Vec<_> = call.operands.iter().enumerate().map(one).collect();
    let mixed = |error: Error| Error::unsupported(format!("operands are bounded differently: {error}"));
    region.value_types(&operands).map_err(mixed)
}

/// A value of the body as a description, from its type with lengths as the names of bounded sizes.
fn described(value: Option<&Option<OperandType>>) -> Result<TensorDesc> {
    let Some(Some(OperandType::Tensor(tensor))) = value else {
        return Err(Error::internal("a value of the body is not a tensor"));
    };
    let shape = tensor.resolve(&|name| name.parse().ok())?;
    let desc = TensorDesc::dense(tensor.dtype, &shape);
    Ok(if is_bounded(tensor) { desc.with_extent() } else { desc })
}

fn is_bounded(tensor: &TensorType) -> bool {
    matches!(tensor.shape.first(), Some(Size::Bounded(_)))
}

/// The length of the first dimension, as a name.
fn first_size(desc: &TensorDesc) -> String {
    desc.shape.first().copied().unwrap_or_default().to_string()
}
