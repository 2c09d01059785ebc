//! Implements core's kernel traits: query, plan, bind and enqueue.

use crate::{
    driver::{
        context::Context,
        memory::WgpuBuffer,
        pipeline::Pipeline,
        stream::{Dispatch, WgpuStream},
    },
    exchange::Exchange,
    ops::{
        self,
        launch::{CallPlan, Launch, Source},
        weight::{self, WgpuWeight},
    },
};
use dsrun_core::{
    Error, Result, WeightReader,
    checked::{ValidArguments, ValidCall},
    device::{Buffer, BufferSlice, MemoryKind, Stream},
    kernels::{
        Argument, Arguments, Binding, BoundCall, Kernels, PackedLayout, PackedWeight, Plan, Support,
        WeightDesc,
    },
    op::Op,
};
use std::{any::Any, sync::Arc};
use wgpu::{BindGroupDescriptor, BindGroupEntry, BindingResource, BufferBinding, BufferSize};

/// The kernels of a device handle.
#[derive(Debug)]
pub(crate) struct WgpuKernels {
    context: Arc<Context>,
    exchange: Exchange,
}

impl WgpuKernels {
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self { context, exchange: Exchange::default() }
    }

    fn planned(&self, call: &ValidCall) -> Result<CallPlan> {
        let plan = ops::plan(call, &self.context.spec)?;
        let buffers = self.context.spec.limits.max_storage_buffers_per_shader_stage as usize;
        for launch in &plan.launches {
            self.context.grid(launch.groups)?;
            let needed = launch.slots.len() + usize::from(launch.shader.has_extents());
            if needed > buffers {
                return Err(Error::unsupported(format!(
                    "needs {needed} buffers, the adapter binds {buffers}"
                )));
            }
        }
        Ok(plan)
    }
}

impl Kernels for WgpuKernels {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        self.context.check()?;
        if call.op.mesh_axis().is_some() {
            return Ok(Support { capture_safe: false, ..self.exchange.query(call)? });
        }
        // The backend has no graphs, so calls are never captured.
        Ok(match self.planned(call) {
            // The order of sums in a linear layer depends on the number of rows.
            Ok(plan) => Support {
                workspace_bytes: plan.workspace,
                capture_safe: false,
                batch_invariant: !matches!(call.op, Op::Linear(_) | Op::Region(_)),
                ..Support::native()
            },
            Err(error) => Support::no(error.to_string()),
        })
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        weight::packed_layout(weight, &self.context.spec)
    }

    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        self.context.check()?;
        let stream = WgpuStream::own(stream, &self.context)?;
        Ok(Arc::new(WgpuWeight::pack(&self.context, stream, weight, rows)?))
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        if call.op.mesh_axis().is_some() {
            return self.exchange.plan(&self.context, call);
        }
        let plan = self.planned(call)?;
        let workspace = plan.workspace;
        let mut parts = Vec::new();
        for launch in plan.launches {
            if launch.groups == 0 {
                continue;
            }
            let pipeline = self.context.pipelines.get(&self.context, &launch.shader, &launch.overrides)?;
            parts.push((launch, pipeline));
        }
        Ok(Arc::new(WgpuPlan { context: self.context.clone(), call: call.clone(), parts, workspace }))
    }
}

/// A planned call: its dispatches with their pipelines.
#[derive(Debug)]
struct WgpuPlan {
    context: Arc<Context>,
    call: ValidCall,
    parts: Vec<(Launch, Arc<Pipeline>)>,
    workspace: usize,
}

impl Plan for WgpuPlan {
    fn workspace_bytes(&self) -> usize {
        self.workspace
    }

    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        let arguments = arguments.arguments();
        let mut call = WgpuCall {
            context: self.context.clone(),
            name: self.call.op.name().to_owned(),
            gathers: Vec::new(),
            dispatches: Vec::new(),
            _keep: Vec::new(),
        };
        for (launch, pipeline) in &self.parts {
            call.bind(launch, pipeline.clone(), arguments)?;
        }
        Ok(Box::new(call))
    }
}

/// A copy of a row count to the buffer where the shader reads it.
#[derive(Debug)]
struct Gather {
    from: Arc<WgpuBuffer>,
    offset: u64,
    to: wgpu::Buffer,
    at: u64,
}

/// A bound call: its dispatches with their bindings.
#[derive(Debug)]
struct WgpuCall {
    context: Arc<Context>,
    name: String,
    gathers: Vec<Gather>,
    dispatches: Vec<Dispatch>,
    _keep: Vec<Arc<WgpuBuffer>>,
}

/// The storage of a slot of a launch: its buffer, the offset of its first byte, and its extent.
fn storage_of<'a>(
    arguments: &'a Arguments,
    source: Source,
    context: &Arc<Context>,
) -> Result<(Arc<WgpuBuffer>, usize, Option<&'a BufferSlice>)> {
    let binding = match (source, arguments) {
        (Source::Operand(index), Arguments { operands, .. }) => match operands.get(index) {
            Some(Some(Argument::Tensor(binding))) => Some(binding),
            _ => None,
        },
        (Source::Weight { operand, part }, Arguments { operands, .. }) => {
            let Some(Some(Argument::Weight(weight))) = operands.get(operand) else {
                return Err(Error::internal(format!("operand {operand} is not a weight")));
            };
            let any: Arc<dyn Any + Send + Sync> = weight.clone();
            let weight = any
                .downcast::<WgpuWeight>()
                .map_err(|_| Error::invalid("belongs to another backend").field("weight"))?;
            let part = weight.buffers.get(part).ok_or_else(|| {
                Error::internal(format!("the weight has {} parts, not {}", weight.buffers.len(), part + 1))
            })?;
            let whole = BufferSlice::new(part.clone(), 0, part.bytes())?;
            return Ok((WgpuBuffer::locate(&whole, context)?, 0, None));
        }
        (Source::Result(index), Arguments { results, .. }) => results.get(index),
        (Source::Workspace { offset, rows_of }, Arguments { operands, workspace, .. }) => {
            let slice = workspace.as_ref().ok_or_else(|| Error::internal("there is no workspace"))?;
            let extent = match operands.get(rows_of) {
                Some(Some(Argument::Tensor(binding))) => binding.extent.as_ref(),
                _ => None,
            };
            return Ok((WgpuBuffer::locate(slice, context)?, slice.offset + offset, extent));
        }
    };
    let binding: &Binding =
        binding.ok_or_else(|| Error::internal(format!("{source:?} is not bound to a tensor")))?;
    let buffer = WgpuBuffer::locate(&binding.slice, context)?;
    Ok((buffer, binding.slice.offset, binding.extent.as_ref()))
}

/// The offset and length in bytes of a binding that contains all of these words of one buffer; `None` if it would be too long.
fn window(extents: &[(usize, &BufferSlice)], alignment: usize, longest: u64) -> Option<(usize, usize)> {
    let offsets = || extents.iter().map(|(_, extent)| extent.offset);
    let start = offsets().min()? / alignment * alignment;
    let bytes = (offsets().max()? + 4 - start).next_multiple_of(16);
    (bytes as u64 <= longest).then_some((start, bytes))
}

impl WgpuCall {
    /// The binding from which a shader reads the row counts of bounded tensors: buffer, offset and length. Sets the words of the
    /// uniform to the index of each count in it.
    ///
    /// Counts that fit into one binding are read in place. Others are first gathered into one buffer, which takes as long as a
    /// dispatch.
    fn counts(
        &mut self,
        extents: &[(usize, &BufferSlice)],
        words: &mut [u32],
    ) -> Result<Option<(Arc<WgpuBuffer>, u64, u64)>> {
        let Some((_, first)) = extents.first() else { return Ok(None) };
        let mut tell = |word: usize, element: usize| {
            if let Some(word) = words.get_mut(word) {
                *word = element as u32;
            }
        };
        let located = |extent: &BufferSlice| -> Result<Arc<WgpuBuffer>> {
            let buffer = WgpuBuffer::locate(extent, &self.context).map_err(|error| error.field("extent"))?;
            buffer.device_memory()?;
            Ok(buffer)
        };
        let (alignment, longest) =
            (self.context.spec.alignment, self.context.spec.limits.max_storage_buffer_binding_size);
        let alike = extents.iter().all(|(_, extent)| Arc::ptr_eq(&extent.buffer, &first.buffer));
        if alike && let Some((start, bytes)) = window(extents, alignment, longest) {
            extents.iter().for_each(|(word, extent)| tell(*word, (extent.offset - start) / 4));
            return Ok(Some((located(first)?, start as u64, bytes as u64)));
        }
        let mut known: Vec<&BufferSlice> = Vec::new();
        for (word, extent) in extents {
            let index = known.iter().position(|known| known.same(extent)).unwrap_or_else(|| {
                known.push(extent);
                known.len() - 1
            });
            tell(*word, index);
        }
        let buffer = Arc::new(WgpuBuffer::new(self.context.clone(), 4 * known.len(), MemoryKind::Device)?);
        let memory = buffer.device_memory()?.clone();
        for (index, extent) in known.iter().enumerate() {
            let (offset, at) = (extent.offset as u64, 4 * index as u64);
            self.gathers.push(Gather { from: located(extent)?, offset, to: memory.clone(), at });
        }
        let bytes = (4 * known.len()).next_multiple_of(16) as u64;
        Ok(Some((buffer, 0, bytes)))
    }

    fn bind(&mut self, launch: &Launch, pipeline: Arc<Pipeline>, arguments: &Arguments) -> Result<()> {
        let context = self.context.clone();
        let mut words = launch.words.clone();
        let mut extents: Vec<(usize, &BufferSlice)> = Vec::new();
        let mut tensors = Vec::new();
        for slot in &launch.slots {
            let (buffer, offset, extent) = storage_of(arguments, slot.source, &context)?;
            buffer.device_memory()?;
            extents.extend(slot.extent.zip(extent));
            tensors.push((buffer, offset, slot.bytes));
        }
        let mut entries: Vec<BindingResource<'_>> = Vec::new();
        for (buffer, offset, bytes) in &tensors {
            let memory = buffer.device_memory()?;
            entries.push(match bytes {
                0 => context.stand_in.as_entire_binding(),
                bytes => BindingResource::Buffer(BufferBinding {
                    buffer: memory,
                    offset: *offset as u64,
                    size: BufferSize::new(bytes.next_multiple_of(16) as u64),
                }),
            });
        }
        let counts = self.counts(&extents, &mut words)?;
        if launch.shader.has_extents() {
            entries.push(match &counts {
                Some((buffer, offset, bytes)) => BindingResource::Buffer(BufferBinding {
                    buffer: buffer.device_memory()?,
                    offset: *offset,
                    size: BufferSize::new(*bytes),
                }),
                None => context.stand_in.as_entire_binding(),
            });
        }
        let uniform = context.uniform(&words)?;
        entries.push(uniform.as_entire_binding());
        let entries: Vec<BindGroupEntry<'_>> = entries
            .into_iter()
            .zip(0..)
            .map(|(resource, binding)| BindGroupEntry { binding, resource })
            .collect();
        let descriptor = BindGroupDescriptor { label: None, layout: &pipeline.layout, entries: &entries };
        let bindings = context.scoped("binding a call", || context.device.create_bind_group(&descriptor))?;
        self._keep.extend(tensors.into_iter().map(|(buffer, ..)| buffer));
        self._keep.extend(counts.map(|(buffer, ..)| buffer));
        let groups = context.grid(launch.groups)?;
        self.dispatches.push(Dispatch { pipeline, bindings, groups });
        Ok(())
    }
}

impl BoundCall for WgpuCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        let in_op = |error: Error| error.in_op(&self.name);
        let stream = WgpuStream::own(stream, &self.context).map_err(in_op)?;
        self.context.check().map_err(in_op)?;
        for Gather { from, offset, to, at } in &self.gathers {
            stream.copy_words((from.device_memory()?, *offset), (to, *at), 4);
        }
        stream.dispatch(&self.dispatches).map_err(in_op)
    }
}
