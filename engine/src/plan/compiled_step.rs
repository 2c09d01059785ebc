//! A step that is ready to run: its calls planned for the sizes of a bucket.
//!
//! A step is compiled once per [`Bucket`](super::Bucket) and kept. All steps share their input buffer, arena and workspace, since
//! they run one at a time. Segments that run without host work between them are bound, and captured as a graph, as one unit, the
//! first time they run together.

use super::{
    cache_ring::CacheRing,
    execution_context::ExecutionContext,
    host_caches::caches,
    layout::{InputLayout, Layout},
    plan_cache::PlanCache,
    step_interface::{SegmentSet, StepOutput, StepSegment},
    stream::{Reads, WeightRing, parts, parts_by_caches},
};
use crate::{error::Result, trace::RankTrace};
use dsrun_core::{
    Error,
    checked::CheckedPlan,
    device::{BufferSlice, Device, Stream},
    graph::{CallList, Graph},
    op::Op,
    program::{Call, Program, SegmentKind},
};

/// A step that is ready to run.
#[derive(Debug)]
pub(crate) struct CompiledStep {
    layout: Layout,
    /// The plan of each node of the program; `None` where there is nothing to do.
    plans: Vec<Option<CheckedPlan>>,
    /// Whether segments are captured as graphs where their kind allows it.
    capture: bool,
    /// The bound calls of segments that have run before, by the set of segments launched together.
    graphs: Vec<(SegmentSet, Vec<BoundPart>)>,
    outputs: [Option<BufferSlice>; StepOutput::ALL.len()],
    /// Records the collectives. Calls are then launched one by one.
    trace: Option<RankTrace>,
}

/// Bound calls that are launched as one graph, or one by one.
#[derive(Debug)]
struct BoundPart {
    /// The streamed layer whose weights they read.
    layer: Option<usize>,
    /// The layer whose keys and values are copied to the device for them.
    caches: Option<usize>,
    graph: Box<dyn Graph>,
}

/// What is copied to the device while a step runs.
#[derive(Debug, Default)]
pub(crate) struct Rings<'a> {
    /// The weights of streamed layers.
    pub(crate) weights: Option<&'a mut WeightRing>,
    /// Keys and values in host memory.
    pub(crate) caches: Option<&'a mut CacheRing>,
}

impl Rings<'_> {
    fn reborrow(&mut self) -> Rings<'_> {
        Rings { weights: self.weights.as_deref_mut(), caches: self.caches.as_deref_mut() }
    }
}

impl CompiledStep {
    /// Plans every call of a layout's program. `capture` says whether segments are captured as graphs when they first run; with a
    /// `trace` they never are.
    ///
    /// # Errors
    /// If the device refuses a call.
    pub(crate) fn new(
        layout: Layout,
        context: ExecutionContext<'_>,
        device: &dyn Device,
        plans: &mut PlanCache,
        capture: bool,
        trace: Option<RankTrace>,
    ) -> Result<Self> {
        let plan = |(node, desc)| layout.runs(node).then(|| plans.plan(device, desc)).transpose();
        let plans = layout.calls.iter().enumerate().map(plan).collect::<Result<_>>()?;
        let storage = context.storage(&layout);
        let outputs = StepOutput::ALL.map(|output| storage.output(output).ok());
        let capture = capture && trace.is_none();
        Ok(Self { layout, plans, capture, graphs: Vec::new(), outputs, trace })
    }

    /// The offsets of the step's inputs in the input buffer.
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

    /// Enqueues segments in the order of the step. They are captured as one graph if all of them can be captured, because every
    /// graph launch has overhead. Each streamed layer is a separate graph, which waits until its weights have been copied, and so is
    /// each layer whose keys and values are copied.
    ///
    /// # Errors
    /// The first time, if the device refuses to bind or to capture a call; later, if the device failed.
    pub(crate) fn enqueue(
        &mut self,
        segments: SegmentSet,
        context: ExecutionContext<'_>,
        device: &dyn Device,
        stream: &mut dyn Stream,
        mut rings: Rings<'_>,
    ) -> Result<()> {
        if let Some((_, parts)) = self.graphs.iter().find(|(known, _)| *known == segments) {
            return launch(parts, stream, rings);
        }
        let program = &self.layout.program;
        let may_be_captured = |segment: StepSegment| {
            let mut own = program.segments.iter().filter(|own| own.name == segment.name());
            self.capture && own.all(|own| own.kind == SegmentKind::Graph)
        };
        let together = segments.iter().all(may_be_captured);
        if !together && segments.iter().count() > 1 {
            let mut single = segments.iter().map(|segment| SegmentSet::new(&[segment]));
            return single
                .try_for_each(|segment| self.enqueue(segment, context, device, stream, rings.reborrow()));
        }
        let storage = context.storage(&self.layout);
        let (mut calls, mut reads, mut cached) = (Vec::new(), Vec::new(), Vec::new());
        for (node, plan) in program.nodes.iter().zip(&self.plans) {
            let Some(plan) = plan else { continue };
            if segments.contains(self.layout.segment(node.segment)?) {
                let call = plan.bind(&storage.arguments(&node.call)?)?;
                let alone = node.call.op.mesh_axis().is_some() && !matches!(node.call.op, Op::Region(_));
                calls.push(Some(match self.trace.as_ref().filter(|_| alone) {
                    Some(trace) => trace.collective(&node.call.op, call),
                    None => call,
                }));
                reads.push(reads_of(program, &node.call, rings.weights.as_deref())?);
                cached.push(caches_of(program, &node.call, rings.caches.as_deref())?);
            }
        }
        let mut bound = Vec::new();
        for part in parts_by_caches(parts(reads), &cached) {
            let calls: Vec<_> = part.calls.iter().filter_map(|call| calls[*call].take()).collect();
            let graph = match device.graphs().filter(|_| together) {
                Some(graphs) => graphs.capture(stream, calls)?,
                None => Box::new(CallList::new(calls)),
            };
            bound.push(BoundPart { layer: part.layer, caches: part.caches, graph });
        }
        launch(&bound, stream, rings)?;
        self.graphs.push((segments, bound));
        Ok(())
    }
}

/// Launches the parts of a step in order. Those that use a streamed layer wait for the copy of its weights, and those that use caches in
/// host memory for the copies of their pages.
fn launch(parts: &[BoundPart], stream: &mut dyn Stream, mut rings: Rings<'_>) -> Result<()> {
    let weights = |part: &BoundPart| part.layer;
    let caches = |part: &BoundPart| part.caches;
    for (index, part) in parts.iter().enumerate() {
        let (before, after) = (&parts[..index], &parts[index + 1..]);
        if let (Some(own), Some(ring)) = (part.layer, &mut rings.weights)
            && before.iter().rev().find_map(weights) != Some(own)
        {
            ring.acquire(own, stream)?;
        }
        if let (Some(own), Some(ring)) = (part.caches, &mut rings.caches)
            && before.iter().rev().find_map(caches) != Some(own)
        {
            ring.acquire(own, stream)?;
        }
        part.graph.launch(stream)?;
        if let (Some(own), Some(ring)) = (part.caches, &mut rings.caches)
            && after.iter().find_map(caches) != Some(own)
        {
            ring.release(own, stream)?;
        }
        if let (Some(own), Some(ring)) = (part.layer, &mut rings.weights)
            && after.iter().find_map(weights) != Some(own)
        {
            ring.release(own, stream)?;
        }
    }
    Ok(())
}

/// The layer of the caches that a call uses, of those that are copied to the device.
fn caches_of(program: &Program, call: &Call, ring: Option<&CacheRing>) -> Result<Option<usize>> {
    let Some(ring) = ring else { return Ok(None) };
    let mut layers = caches(program, call)?.into_iter().filter_map(|value| ring.layer_of(&value.name));
    let first = layers.next();
    match layers.find(|layer| Some(*layer) != first) {
        None => Ok(first),
        Some(other) => {
            let message = format!("uses keys and values of several layers in host memory, such as {other}");
            Err(Error::internal(message).in_op(call.op.name()).into())
        }
    }
}

/// The weights that a call reads.
fn reads_of(program: &Program, call: &Call, ring: Option<&WeightRing>) -> Result<Reads> {
    let mut reads = Reads::NoWeights;
    for id in call.operands.iter().flatten() {
        let value = program.value(*id)?;
        if value.weight_type().is_none() {
            continue;
        }
        let layer = ring.and_then(|ring| ring.layer_of(&value.name));
        reads = match (reads, layer) {
            (Reads::Streamed(one), Some(other)) if one != other => {
                let message = format!("reads weights of the streamed layers {one} and {other}");
                return Err(Error::internal(message).in_op(call.op.name()).into());
            }
            (_, Some(layer)) => Reads::Streamed(layer),
            (Reads::NoWeights, None) => Reads::Resident,
            (known, None) => known,
        };
    }
    Ok(reads)
}
