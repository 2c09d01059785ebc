//! A step that is ready to run: its calls planned for the sizes of a bucket.
//!
//! A step is compiled once per [`Bucket`](super::Bucket) and kept. All steps share their input buffer, arena and workspace, since
//! they run one at a time. Segments that run without host work between them are bound, and captured as a graph, as one unit, the
//! first time they run together.

use super::{
    execution_context::ExecutionContext,
    layout::{InputLayout, Layout},
    plan_cache::PlanCache,
    step_interface::{SegmentSet, StepOutput, StepSegment},
};
use crate::error::Result;
use dsrun_core::{
    Error,
    checked::CheckedPlan,
    device::{BufferSlice, Device, Stream},
    graph::{CallList, Graph},
    program::SegmentKind,
};

/// A step that is ready to run.
#[derive(Debug)]
pub(crate) struct CompiledStep {
    layout: Layout,
    /// The plan of each node of the program; `None` where there is nothing to do.
    plans: Vec<Option<CheckedPlan>>,
    /// Whether segments are captured as graphs where their kind allows it.
    capture: bool,
    /// The bound calls of the segments that ran so far, by the set that was launched together.
    graphs: Vec<(SegmentSet, Box<dyn Graph>)>,
    outputs: [Option<BufferSlice>; StepOutput::ALL.len()],
}

impl CompiledStep {
    /// Plans every call of a layout's program. `capture` says whether segments are captured as graphs when they first run.
    ///
    /// # Errors
    /// If the device refuses a call.
    pub(crate) fn new(
        layout: Layout,
        context: ExecutionContext<'_>,
        device: &dyn Device,
        plans: &mut PlanCache,
        capture: bool,
    ) -> Result<Self> {
        let plan = |(node, desc)| layout.runs(node).then(|| plans.plan(device, desc)).transpose();
        let plans = layout.calls.iter().enumerate().map(plan).collect::<Result<_>>()?;
        let storage = context.storage(&layout);
        let outputs = StepOutput::ALL.map(|output| storage.output(output).ok());
        Ok(Self { layout, plans, capture, graphs: Vec::new(), outputs })
    }

    /// The places of the step's inputs in the input buffer.
    pub(crate) fn inputs(&self) -> &InputLayout {
        &self.layout.inputs
    }

    /// The memory of an output, valid after its segment has run.
    ///
    /// # Errors
    /// If the program does not have the output.
    pub(crate) fn output(&self, output: StepOutput) -> Result<&BufferSlice> {
        let slice = self.outputs[output as usize].as_ref();
        Ok(slice.ok_or_else(|| Error::internal(format!("the program has no output `{}`", output.name())))?)
    }

    /// The number of calls.
    pub(crate) fn calls(&self) -> usize {
        self.plans.iter().flatten().count()
    }

    /// Enqueues segments in the order of the step. They are captured as one graph if all of them may be: each graph costs the
    /// device its beginning and its end.
    ///
    /// # Errors
    /// The first time, if the device refuses to bind or to capture a call; later, if the device failed.
    pub(crate) fn enqueue(
        &mut self,
        segments: SegmentSet,
        context: ExecutionContext<'_>,
        device: &dyn Device,
        stream: &mut dyn Stream,
    ) -> Result<()> {
        if let Some((_, graph)) = self.graphs.iter().find(|(known, _)| *known == segments) {
            return Ok(graph.launch(stream)?);
        }
        let program = &self.layout.program;
        let may_be_captured = |segment: StepSegment| {
            let mut own = program.segments.iter().filter(|own| own.name == segment.name());
            self.capture && own.all(|own| own.kind == SegmentKind::Graph)
        };
        let together = segments.iter().all(may_be_captured);
        if !together && segments.iter().count() > 1 {
            let mut single = segments.iter().map(|segment| SegmentSet::new(&[segment]));
            return single.try_for_each(|segment| self.enqueue(segment, context, device, stream));
        }
        let storage = context.storage(&self.layout);
        let mut calls = Vec::new();
        for (node, plan) in program.nodes.iter().zip(&self.plans) {
            let Some(plan) = plan else { continue };
            if segments.contains(self.layout.segment(node.segment)?) {
                calls.push(plan.bind(&storage.arguments(&node.call)?)?);
            }
        }
        let graph = match device.graphs().filter(|_| together) {
            Some(graphs) if !calls.is_empty() => graphs.capture(stream, calls)?,
            _ => Box::new(CallList::new(calls)),
        };
        graph.launch(stream)?;
        self.graphs.push((segments, graph));
        Ok(())
    }
}
