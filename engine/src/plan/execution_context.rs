//! The device memory that a step's calls are bound to.

use super::{
    layout::{Layout, SharedSizes},
    step_interface::{StepInput, StepOutput, StepState},
};
use crate::error::Result;
use dsrun_core::{
    Error,
    device::{BufferSlice, Device, MemoryKind},
    kernels::{Argument, Arguments, Binding, PackedWeight},
    op::OperandType,
    program::{Call, Origin, ValueId},
};
use std::{collections::HashMap, sync::Arc};

/// Weights and states on the device, by the name of their value. All programs of an engine share them.
#[derive(Debug, Default)]
pub(crate) struct Resident {
    /// Plain tensors: states, and weights that are vectors.
    pub(crate) tensors: HashMap<String, BufferSlice>,
    /// The slots on the device of caches whose memory is on the host, for steps that copy their pages.
    pub(crate) cache_slots: HashMap<String, BufferSlice>,
    /// Packed weights; those of streamed layers are in the slots of the ring.
    pub(crate) weights: HashMap<String, Arc<dyn PackedWeight>>,
    /// The weights of streamed layers in host memory, for steps that read them there.
    pub(crate) in_place: HashMap<String, Arc<dyn PackedWeight>>,
}

impl Resident {
    /// A state that the host writes.
    ///
    /// # Errors
    /// If the program does not have the state.
    pub(crate) fn state(&self, state: StepState) -> Result<&BufferSlice> {
        let slice = self.tensors.get(state.name());
        Ok(slice.ok_or_else(|| Error::internal(format!("the program has no state `{}`", state.name())))?)
    }
}

/// Memory that all steps share, since steps run one at a time.
#[derive(Clone, Debug)]
pub(crate) struct SharedMemory {
    /// The inputs of a step, uploaded in one piece.
    pub(crate) inputs: BufferSlice,
    /// Intermediate results and outputs.
    pub(crate) arena: BufferSlice,
    /// Scratch memory of ops.
    pub(crate) workspace: BufferSlice,
}

impl SharedMemory {
    /// Allocates memory of these sizes.
    ///
    /// # Errors
    /// If the device has too little memory.
    pub(crate) fn allocate(device: &dyn Device, sizes: SharedSizes) -> Result<Self> {
        let allocate = |bytes: usize| -> Result<BufferSlice> {
            Ok(BufferSlice::whole(device.allocate(bytes.max(1), MemoryKind::Device)?))
        };
        let SharedSizes { inputs, arena, workspace } = sizes;
        Ok(Self { inputs: allocate(inputs)?, arena: allocate(arena)?, workspace: allocate(workspace)? })
    }

    /// The sizes of the memory.
    pub(crate) fn sizes(&self) -> SharedSizes {
        SharedSizes { inputs: self.inputs.bytes, arena: self.arena.bytes, workspace: self.workspace.bytes }
    }
}

/// All device memory of a step's values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExecutionContext<'a> {
    /// Weights and states.
    pub(crate) resident: &'a Resident,
    /// Whether the step reads the weights of streamed layers in host memory.
    pub(crate) weights_in_place: bool,
    /// Whether the step reads and writes caches in host memory there.
    pub(crate) caches_in_place: bool,
    /// Inputs, intermediate results and scratch memory.
    pub(crate) shared: &'a SharedMemory,
}

impl<'a> ExecutionContext<'a> {
    /// Finds the memory of the values of a layout.
    pub(crate) fn storage(self, layout: &'a Layout) -> ValueStorage<'a> {
        ValueStorage { layout, context: self }
    }
}

/// The memory of each value of a program.
#[derive(Debug)]
pub(crate) struct ValueStorage<'a> {
    layout: &'a Layout,
    context: ExecutionContext<'a>,
}

impl ValueStorage<'_> {
    /// The arguments that a call is bound to.
    ///
    /// # Errors
    /// If a value has no memory, which is a defect.
    pub(crate) fn arguments(&self, call: &Call) -> Result<Arguments> {
        Ok(Arguments {
            operands: (call.operands.iter())
                .map(|id| id.map(|id| self.argument(id)).transpose())
                .collect::<Result<_>>()?,
            results: call.results.iter().map(|id| self.binding(*id)).collect::<Result<_>>()?,
            workspace: Some(self.context.shared.workspace.clone()),
        })
    }

    /// The memory of an output.
    ///
    /// # Errors
    /// If the program does not have the output.
    pub(crate) fn output(&self, output: StepOutput) -> Result<BufferSlice> {
        Ok(self.binding(self.layout.output(output)?)?.slice)
    }

    fn argument(&self, id: ValueId) -> Result<Argument> {
        let value = self.layout.program.value(id)?;
        if let OperandType::Weight(_) = value.value_type {
            let Resident { weights, in_place, .. } = self.context.resident;
            let in_place = self.context.weights_in_place.then(|| in_place.get(&value.name)).flatten();
            let weight = in_place.or_else(|| weights.get(&value.name));
            return Ok(Argument::Weight(weight.ok_or_else(|| self.no_storage(id))?.clone()));
        }
        self.binding(id).map(Argument::Tensor)
    }

    fn binding(&self, id: ValueId) -> Result<Binding> {
        let owner = self.layout.storage_owner(id);
        let value = self.layout.program.value(owner)?;
        let shared = self.context.shared;
        let slice = match value.origin {
            Origin::Input => {
                let input = StepInput::from_name(&value.name).ok_or_else(|| self.no_storage(owner))?;
                let range = self.layout.inputs.range(input)?;
                shared.inputs.slice(range.start, range.len())?
            }
            Origin::State | Origin::Weight(_) => {
                let Resident { tensors, cache_slots, .. } = self.context.resident;
                let slot = (!self.context.caches_in_place).then(|| cache_slots.get(&value.name)).flatten();
                let tensor = slot.or_else(|| tensors.get(&value.name));
                tensor.ok_or_else(|| self.no_storage(owner))?.clone()
            }
            Origin::Node(_) => {
                let range = self.layout.arena_range(owner).ok_or_else(|| self.no_storage(owner))?;
                shared.arena.slice(range.start, range.len())?
            }
        };
        Ok(Binding { slice, extent: self.extent(id)? })
    }

    /// The device's count of the rows in use of a value, if its first dimension is bounded.
    fn extent(&self, id: ValueId) -> Result<Option<BufferSlice>> {
        let Some(range) = self.layout.extent_range(id)? else { return Ok(None) };
        Ok(Some(self.context.shared.inputs.slice(range.start, range.len())?))
    }

    fn no_storage(&self, id: ValueId) -> Error {
        let name = self.layout.program.value(id).map(|value| value.name.clone()).unwrap_or_default();
        Error::internal(format!("value {id} `{name}` has no memory on the device"))
    }
}
