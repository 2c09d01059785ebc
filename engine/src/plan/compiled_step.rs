//! From a program to calls a device can run: sizes chosen, storage assigned, ops planned and bound.
//!
//! A step is compiled once per [`Bucket`] and kept. All buckets share the step's input buffer and its arena, since one
//! step runs at a time. Segments that run one behind the other are bound, and captured, as one, when they first run so.

use super::{layout::Layout, plan_cache::PlanCache};
use crate::error::Result;
use dsrun_core::{
    DType, Error,
    checked::CheckedPlan,
    device::{BufferSlice, Device, Stream},
    graph::{CallList, Graph},
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc, PackedWeight},
    op::OperandType,
    program::{Call, Origin, Program, Segment, SegmentKind, ValueId},
};
use std::{collections::HashMap, ops::Range, sync::Arc};

/// The sizes a step is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Bucket {
    /// Most tokens.
    pub(crate) tokens: usize,
    /// Most sequences.
    pub(crate) sequences: usize,
    /// Most rows whose logits are wanted.
    pub(crate) rows: usize,
    /// Whether each token is a wanted row, or there is just one token: wanted rows then stay where they are.
    pub(crate) every: bool,
}

/// Up to here sizes are rounded up to powers of two, beyond it to quarters of what lies between two of these: products of many
/// rows may be computed for all rows of the bucket, at a cost that grows with them.
const FINER_BEYOND: usize = 1024;

/// The size that a step is compiled for to have room for `size`, within the limit.
fn rounded(size: usize, limit: usize) -> usize {
    let power = size.max(1).next_power_of_two();
    let step = if power > FINER_BEYOND { power / 8 } else { power };
    size.max(1).next_multiple_of(step).min(limit.max(1))
}

/// All sizes up to a limit that steps are compiled for.
fn sizes_up_to(limit: usize) -> impl Iterator<Item = usize> {
    let next = move |size: &usize| (*size < limit).then(|| rounded(size + 1, limit));
    std::iter::successors(Some(rounded(1, limit)), next)
}

impl Bucket {
    /// The bucket for these sizes, of which some tokens are not wanted: each rounded up, within the limits.
    pub(crate) fn fitting(tokens: usize, sequences: usize, rows: usize, limits: Self) -> Self {
        Self {
            tokens: rounded(tokens, limits.tokens),
            sequences: rounded(sequences, limits.sequences),
            rows: rounded(rows, limits.rows),
            every: false,
        }
    }

    /// The bucket for so many tokens that are all wanted.
    pub(crate) fn every(tokens: usize, sequences: usize, limits: Self) -> Self {
        let tokens = rounded(tokens, limits.tokens.min(limits.rows));
        Self { tokens, sequences: rounded(sequences, limits.sequences), rows: tokens, every: true }
    }

    /// Every bucket that a step within the limits can have: at least a token for each sequence and each row, at most `rows` of
    /// these for a sequence.
    pub(crate) fn all(limits: Self, rows: usize) -> Vec<Self> {
        let mut buckets = Vec::new();
        for sequences in sizes_up_to(limits.sequences) {
            for rows in sizes_up_to(rounded(sequences * rows, limits.rows)) {
                if (sequences..=limits.tokens).contains(&rows) {
                    buckets.push(Self { tokens: rows, sequences, rows, every: true });
                }
                // A single token is wanted, or stays where it is all the same.
                let enough = |tokens: &usize| *tokens > 1 && *tokens >= sequences.max(rows);
                let enough = sizes_up_to(limits.tokens).filter(enough);
                buckets.extend(enough.map(|tokens| Self { tokens, sequences, rows, every: false }));
            }
        }
        buckets
    }
}

/// Sizes that hold for as long as the engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FixedSizes {
    /// Rows of the request table.
    pub(crate) requests: usize,
    /// Pages a request can have.
    pub(crate) blocks: usize,
    /// Pages of the KV cache.
    pub(crate) pages: usize,
    /// Tokens that end a request.
    pub(crate) stop_ids: usize,
}

/// All sizes of a bucket by name.
pub(crate) fn sizes(bucket: Bucket, fixed: FixedSizes) -> impl Fn(&str) -> Option<usize> {
    move |name| match name {
        "tokens" => Some(bucket.tokens),
        "sequences" => Some(bucket.sequences),
        "rows" => Some(bucket.rows),
        "requests" => Some(fixed.requests),
        "blocks" => Some(fixed.blocks),
        "pages" => Some(fixed.pages),
        "stop_ids" => Some(fixed.stop_ids),
        _ => None,
    }
}

/// Weights and states on the device, by their value in the program.
#[derive(Debug, Default)]
pub(crate) struct Resident {
    /// Plain tensors: states, and weights that are vectors.
    pub(crate) tensors: HashMap<ValueId, BufferSlice>,
    /// Packed weights.
    pub(crate) weights: HashMap<ValueId, Arc<dyn PackedWeight>>,
}

/// Memory that all buckets share.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    /// The step's inputs, uploaded in one piece.
    pub(crate) inputs: BufferSlice,
    /// Intermediate results and outputs.
    pub(crate) arena: BufferSlice,
    /// Scratch memory of ops.
    pub(crate) workspace: BufferSlice,
}

/// A step ready to run.
#[derive(Debug)]
pub(crate) struct CompiledStep {
    layout: Layout,
    /// The plan of each node of the program; none where there is nothing to do.
    plans: Vec<Option<CheckedPlan>>,
    /// Whether segments are captured that may be.
    capture: bool,
    /// What ran so far, by the segments it consists of.
    runs: Vec<(Vec<String>, Box<dyn Graph>)>,
    outputs: HashMap<String, BufferSlice>,
}

/// Where an input stands in the staging memory.
pub(crate) fn input_range(inputs: &HashMap<String, Range<usize>>, name: &str) -> Result<Range<usize>> {
    let range = inputs.get(name).cloned();
    Ok(range.ok_or_else(|| Error::internal(format!("the program has no input `{name}`")))?)
}

/// The name under which the extents stand among the inputs.
pub(crate) const EXTENTS: &str = "extents";

impl CompiledStep {
    /// Plans every call of the program; what may be captured is, when it first runs, if `capture` says so.
    ///
    /// # Errors
    /// If the device refuses a call.
    pub(crate) fn new(
        layout: Layout,
        site: &Site<'_>,
        device: &dyn Device,
        plans: &mut PlanCache,
        capture: bool,
    ) -> Result<Self> {
        let plan = |(node, desc)| layout.runs(node).then(|| plans.plan(device, desc)).transpose();
        let plans = layout.calls.iter().enumerate().map(plan).collect::<Result<_>>()?;
        let storage = site.storage(&layout);
        let mut outputs = HashMap::new();
        for (name, id) in &layout.outputs {
            outputs.insert(name.clone(), storage.binding(*id)?.slice);
        }
        Ok(Self { layout, plans, capture, runs: Vec::new(), outputs })
    }

    /// Where an input stands in the staging memory.
    pub(crate) fn input(&self, name: &str) -> Result<Range<usize>> {
        input_range(&self.layout.inputs, name)
    }

    /// Where an output is after the step.
    pub(crate) fn output(&self, name: &str) -> Result<&BufferSlice> {
        let slice = self.outputs.get(name);
        Ok(slice.ok_or_else(|| Error::internal(format!("the program has no output `{name}`")))?)
    }

    /// Calls in all.
    pub(crate) fn calls(&self) -> usize {
        self.plans.iter().flatten().count()
    }

    /// Enqueues segments, one behind the other. Those of one call are captured together: a graph costs a device its beginning
    /// and its end.
    ///
    /// # Errors
    /// If it is their first time, and the device refuses to bind or to capture a call; if the device failed.
    pub(crate) fn enqueue(
        &mut self,
        segments: &[&str],
        site: &Site<'_>,
        device: &dyn Device,
        stream: &mut dyn Stream,
    ) -> Result<()> {
        if let Some((_, graph)) = self.runs.iter().find(|(known, _)| known == segments) {
            return Ok(graph.launch(stream)?);
        }
        let all = &site.program.segments;
        let named = |index: usize| all.get(index).is_some_and(|own| segments.contains(&own.name.as_str()));
        let captured = |segment: &&Segment| segment.kind == SegmentKind::Graph && self.capture;
        let together =
            all.iter().filter(|own| segments.contains(&own.name.as_str())).all(|own| captured(&own));
        if !together && segments.len() > 1 {
            return segments.iter().try_for_each(|segment| self.enqueue(&[*segment], site, device, stream));
        }
        let storage = site.storage(&self.layout);
        let mut calls = Vec::new();
        for (node, plan) in site.program.nodes.iter().zip(&self.plans) {
            if let (true, Some(plan)) = (named(node.segment), plan) {
                calls.push(plan.bind(&storage.arguments(&node.call)?)?);
            }
        }
        let graph = match device.graphs().filter(|_| together) {
            Some(graphs) if !calls.is_empty() => graphs.capture(stream, calls)?,
            _ => Box::new(CallList::new(calls)),
        };
        graph.launch(stream)?;
        self.runs.push((segments.iter().map(|segment| (*segment).to_owned()).collect(), graph));
        Ok(())
    }
}

/// A program, and what of it is on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site<'a> {
    pub(crate) program: &'a Program,
    pub(crate) resident: &'a Resident,
    pub(crate) shared: &'a Shared,
}

impl<'a> Site<'a> {
    /// Where values are, given the plan of their storage.
    pub(crate) fn storage(self, layout: &'a Layout) -> Storage<'a> {
        let Self { program, resident, shared } = self;
        Storage { program, layout, resident, shared }
    }
}

/// Finds the storage of a program's values.
pub(crate) struct Storage<'a> {
    program: &'a Program,
    layout: &'a Layout,
    resident: &'a Resident,
    shared: &'a Shared,
}

impl Storage<'_> {
    /// What a call is bound to.
    pub(crate) fn arguments(&self, call: &Call) -> Result<Arguments> {
        Ok(Arguments {
            operands: (call.operands.iter())
                .map(|id| id.map(|id| self.argument(id)).transpose())
                .collect::<Result<_>>()?,
            results: call.results.iter().map(|id| self.binding(*id)).collect::<Result<_>>()?,
            workspace: Some(self.shared.workspace.clone()),
        })
    }

    /// Where an output of the program is.
    pub(crate) fn output(&self, name: &str) -> Result<BufferSlice> {
        let output = self.layout.outputs.iter().find(|(output, _)| output == name);
        let (_, id) = output.ok_or_else(|| Error::internal(format!("the program has no output `{name}`")))?;
        Ok(self.binding(*id)?.slice)
    }

    fn argument(&self, id: ValueId) -> Result<Argument> {
        if let OperandType::Weight(_) = self.program.value(id)?.value_type {
            let weight = self.resident.weights.get(&id);
            return Ok(Argument::Weight(weight.ok_or_else(|| not_resident(self.program, id))?.clone()));
        }
        self.binding(id).map(Argument::Tensor)
    }

    fn binding(&self, id: ValueId) -> Result<Binding> {
        let root = self.layout.root(id);
        let value = self.program.value(root)?;
        let slice = match value.origin {
            Origin::Input => {
                let range = self.layout.inputs.get(&value.name).cloned();
                let range = range.ok_or_else(|| not_resident(self.program, root))?;
                self.shared.inputs.slice(range.start, range.len())?
            }
            Origin::State | Origin::Weight(_) => {
                self.resident.tensors.get(&root).ok_or_else(|| not_resident(self.program, root))?.clone()
            }
            Origin::Node(_) => {
                let range = self.layout.arena.get(&root).ok_or_else(|| not_resident(self.program, root))?;
                self.shared.arena.slice(range.start, range.len())?
            }
        };
        Ok(Binding { slice, extent: self.extent(id)? })
    }

    /// The device's count of real rows of a value, if its first dimension is bounded.
    fn extent(&self, id: ValueId) -> Result<Option<BufferSlice>> {
        let Some(index) = self.layout.extent_index(self.program, id)? else { return Ok(None) };
        let extents = self.layout.inputs.get(EXTENTS).ok_or_else(|| not_resident(self.program, id))?;
        Ok(Some(self.shared.inputs.slice(extents.start + index * DType::I32.bytes(), DType::I32.bytes())?))
    }
}

fn not_resident(program: &Program, id: ValueId) -> Error {
    let name = program.value(id).map(|value| value.name.clone()).unwrap_or_default();
    Error::internal(format!("{id} {name} has no storage"))
}

/// The description of a call of a program's values, for the sizes of a bucket.
pub(crate) fn describe_call(
    program: &Program,
    call: &Call,
    sizes: &dyn Fn(&str) -> Option<usize>,
) -> Result<CallDesc, Error> {
    let tensor = |id: ValueId| {
        let value = program.value(id)?;
        let tensor = value.tensor_type().ok_or_else(|| Error::internal(format!("{id} is no tensor")))?;
        let desc = dsrun_core::TensorDesc::dense(tensor.dtype, &tensor.resolve(sizes)?);
        let bounded = matches!(tensor.shape.first(), Some(dsrun_core::Size::Bounded(_)));
        Ok(if bounded { desc.with_extent() } else { desc })
    };
    let operand = |id: ValueId| -> Result<OperandDesc, Error> {
        Ok(match &program.value(id)?.value_type {
            OperandType::Weight(weight) => OperandDesc::Weight(weight.clone()),
            OperandType::Tensor(_) => OperandDesc::Tensor(tensor(id)?),
        })
    };
    Ok(CallDesc {
        op: call.op.clone(),
        operands: call.operands.iter().map(|id| id.map(operand).transpose()).collect::<Result<_, _>>()?,
        results: call.results.iter().map(|id| tensor(*id)).collect::<Result<_, Error>>()?,
        comm: None,
    })
}

/// The descriptions of every call of a program, for the sizes of a bucket.
pub(crate) fn describe(
    program: &Program,
    sizes: &dyn Fn(&str) -> Option<usize>,
) -> Result<Vec<CallDesc>, Error> {
    program.nodes.iter().map(|node| describe_call(program, &node.call, sizes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_fits_one_of_the_buckets() {
        for (each, most) in [(1, 6), (3, 18), (5, 30), (64, 48)] {
            let limits = Bucket { tokens: 48, sequences: 6, rows: most, every: false };
            let buckets = Bucket::all(limits, each);
            for sequences in 1..=limits.sequences {
                for rows in 1..=(sequences * each).min(most) {
                    for tokens in sequences.max(rows)..=limits.tokens {
                        let bucket = match tokens == rows {
                            true => Bucket::every(tokens, sequences, limits),
                            false => Bucket::fitting(tokens, sequences, rows, limits),
                        };
                        assert!(buckets.contains(&bucket), "{bucket:?} for {tokens} {sequences} {rows}");
                    }
                }
            }
        }
    }

    #[test]
    fn few_rows_of_a_large_step_are_for_nothing() {
        let sizes: Vec<usize> = sizes_up_to(5000).collect();
        let powers = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
        let finer = [1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5000];
        assert_eq!(sizes, [&powers[..], &finer[..]].concat());
        for size in 1..=5000 {
            assert_eq!(Some(&rounded(size, 5000)), sizes.iter().find(|room| **room >= size), "{size}");
        }
    }
}
