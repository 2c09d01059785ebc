//! A step whose calls run one at a time and whose intermediate results are all kept, so that each call can be observed, timed or
//! repeated.

use super::{executor::Executor, inputs::StepInputs};
use crate::{
    error::Result,
    plan::{Bucket, ExecutionContext, Layout, SharedMemory, StepOutput, StepSegment, ValueStorage},
};
use dsrun_core::{
    device::{BufferSlice, Stream},
    kernels::{Arguments, BoundCall, CallDesc},
    program::{Node, Program},
};
use std::sync::Arc;

/// A step whose calls run one at a time.
#[derive(Debug)]
pub(crate) struct CallByCall {
    layout: Layout,
    shared: SharedMemory,
}

impl CallByCall {
    /// Plans and allocates a step of a program with the same weights and states as the executor's, and at least `workspace` bytes
    /// of scratch memory.
    ///
    /// # Errors
    /// If the device refuses a call, or there is too little memory.
    pub(crate) fn new(
        executor: &Executor,
        program: &Arc<Program>,
        bucket: Bucket,
        workspace: usize,
    ) -> Result<Self> {
        if executor.is_split() {
            let message = "calls run one at a time on one device only: leave --tp out";
            return Err(dsrun_core::Error::unsupported(message).into());
        }
        if executor.plan().stream.is_some() {
            let message = "calls run one at a time only while all weights are on the device: choose --weights-in device";
            return Err(dsrun_core::Error::unsupported(message).into());
        }
        let device = &**executor.device();
        let layout = Layout::keeping_all(program, device, bucket, executor.plan().fixed)?;
        let mut sizes = layout.shared;
        sizes.workspace = sizes.workspace.max(workspace);
        let shared = SharedMemory::allocate(device, sizes)?;
        Ok(Self { layout, shared })
    }

    /// The program of the step.
    pub(crate) fn program(&self) -> &Arc<Program> {
        &self.layout.program
    }

    /// A node of the program, and its description.
    pub(crate) fn call(&self, node: usize) -> (&Node, &CallDesc) {
        (&self.layout.program.nodes[node], &self.layout.calls[node])
    }

    /// The nodes of the given segments that have to run, in order.
    ///
    /// # Errors
    /// If a node names a segment that does not exist, which is a defect.
    pub(crate) fn nodes(&self, segments: &[StepSegment]) -> Result<Vec<usize>> {
        let mut nodes = Vec::new();
        for (index, node) in self.layout.program.nodes.iter().enumerate() {
            if segments.contains(&self.layout.segment(node.segment)?) && self.layout.runs(index) {
                nodes.push(index);
            }
        }
        Ok(nodes)
    }

    /// Uploads the inputs of the step.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn upload(&self, stream: &mut dyn Stream, inputs: &StepInputs) -> Result<()> {
        let mut staging = vec![0xFF; self.layout.inputs.bytes]; // -1 everywhere
        inputs.stage(&mut staging, &self.layout.inputs)?;
        Ok(stream.upload(&staging, &self.shared.inputs.slice(0, staging.len())?)?)
    }

    /// The arguments of a node's call.
    ///
    /// # Errors
    /// If a value has no memory, which is a defect.
    pub(crate) fn arguments(&self, executor: &Executor, node: usize) -> Result<Arguments> {
        self.storage(executor).arguments(&self.layout.program.nodes[node].call)
    }

    /// The memory of an output.
    ///
    /// # Errors
    /// If the program does not have the output.
    pub(crate) fn output(&self, executor: &Executor, output: StepOutput) -> Result<BufferSlice> {
        self.storage(executor).output(output)
    }

    /// Plans a node's call and binds it to its arguments.
    ///
    /// # Errors
    /// If the device refuses the call.
    pub(crate) fn bind(&self, executor: &mut Executor, node: usize) -> Result<Box<dyn BoundCall>> {
        let arguments = self.arguments(executor, node)?;
        let (device, _, plans) = executor.device_stream_plans();
        Ok(plans.plan(device, &self.layout.calls[node])?.bind(&arguments)?)
    }

    fn storage<'a>(&'a self, executor: &'a Executor) -> ValueStorage<'a> {
        let context = ExecutionContext {
            resident: executor.resident(),
            weights_in_place: false,
            caches_in_place: true,
            shared: &self.shared,
        };
        context.storage(&self.layout)
    }
}
