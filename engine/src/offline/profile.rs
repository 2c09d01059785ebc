//! How long each kind of call of a decode step takes, one kind at a time.

use crate::engine::{Engine, STEP_TIMEOUT};
use crate::{
    error::{EngineError, Result},
    plan::{Bucket, Layout, Site, input_range, plan_key, sizes},
    plan::{allocate_shared, is_cache},
    runner::inputs::StepInputs,
};
use dsrun_core::{
    Size,
    device::{Event, Stream},
    graph::{CallList, Graph},
    kernels::{BoundCall, CallDesc, OperandDesc},
    op::{Axis, Op},
    program::{Call, Origin, ValueId},
};
use std::{sync::Arc, time::Instant};

/// The fewest calls that are timed together: one alone would be lost in the launch.
const TOGETHER: usize = 8;

/// What calls of one plan take. All layers share one, and each reads its own weights.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct CallFigures {
    /// The op, or the name of the region.
    pub op: String,
    /// What it works on: its weight, or else its first operand.
    pub works_on: String,
    /// Calls in a step.
    pub count: usize,
    /// Seconds that one call takes.
    pub seconds: f64,
    /// Bytes that one call has to move: weights, activations, and the part of the cache and the request table it touches.
    /// Where they come from a cache of the device, moving them takes less time than memory would.
    pub bytes: u64,
}

impl Engine {
    /// Times every distinct plan of the step that generates a token for each of `requests` requests, `context` tokens
    /// long. The calls of a plan run behind one another, `repeats` times over; the median counts.
    ///
    /// # Errors
    /// If requests are running, there are no pages for such requests, or the device failed.
    pub fn time_calls(
        &mut self,
        requests: usize,
        context: usize,
        repeats: usize,
    ) -> Result<Vec<CallFigures>> {
        if requests == 0 || requests > self.plan.fixed.requests {
            let rule = format!("must be from 1 to {}", self.plan.fixed.requests);
            return Err(EngineError::option("batch", requests, rule));
        }
        if context >= self.plan.context {
            let rule = format!("must be below the context of {}", self.plan.context);
            return Err(EngineError::option("context", context, rule));
        }
        let block = self.plan.options.block_size;
        let tokens = (context + 1).next_multiple_of(block) * requests;
        if self.is_idle() && tokens > self.scheduler.pages().total() * block {
            let rule = format!("{} tokens of KV cache are too few", self.scheduler.pages().total() * block);
            return Err(EngineError::option("batch", requests, rule));
        }
        self.with_pages(tokens, |engine, pages| engine.time_in(pages, requests, context, repeats))
    }

    fn time_in(
        &mut self,
        pages: &[i32],
        requests: usize,
        context: usize,
        repeats: usize,
    ) -> Result<Vec<CallFigures>> {
        let mut inputs = StepInputs::default();
        let last_tokens = self.state("last_token")?;
        for (slot, pages) in pages.chunks(pages.len() / requests).enumerate() {
            self.place_alone(slot, context, pages)?;
            let last = (slot % self.vocabulary) as i32;
            self.stream.upload(
                &last.to_le_bytes(),
                &last_tokens.slice(slot * size_of::<i32>(), size_of::<i32>())?,
            )?;
            inputs.bring_last(slot);
            inputs.sample_last(slot, 1);
        }
        let bucket = Bucket::every(requests, requests, self.plan.limits);
        let program = &self.plan.program;
        let sizes = sizes(bucket, self.plan.fixed);
        let layout = Layout::keeping_all(program, &*self.device, &sizes, bucket.every)?;
        let shared = allocate_shared(&*self.device, &layout)?;
        let storage = Site { program, resident: &self.resident, shared: &shared }.storage(&layout);
        self.staging.clear();
        self.staging.resize(layout.input_bytes, 0xFF);
        let place = |name: &str| input_range(&layout.inputs, name);
        inputs.stage(&mut self.staging, &program.extents, &place)?;
        self.stream.upload(&self.staging, &shared.inputs.slice(0, self.staging.len())?)?;

        // One step in order, so that every call finds what it works on.
        let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
        for (index, (node, desc)) in program.nodes.iter().zip(&layout.calls).enumerate() {
            let segment = program.segments[node.segment].name.as_str();
            if !["forward", "sample"].contains(&segment) || !layout.runs(index) {
                continue;
            }
            let plan = self.plans.plan(&*self.device, desc)?;
            plan.bind(&storage.arguments(&node.call)?)?.enqueue(&mut *self.stream)?;
            let key = plan_key(desc);
            match groups.iter_mut().find(|(known, _)| *known == key) {
                Some((_, nodes)) => nodes.push(index),
                None => groups.push((key, vec![index])),
            }
        }
        self.stream.synchronize("a step", STEP_TIMEOUT)?;

        let clock = Clock { begin: self.device.event()?, end: self.device.event()? };
        let mut figures: Vec<Option<CallFigures>> = vec![None; groups.len()];
        let advances = |index: &usize| {
            matches!(program.nodes[groups[*index].1[0]].call.op, Op::PrepareStep(_) | Op::CommitTokens(_))
        };
        // Those that advance the request table come last: the others work on what it said.
        let mut order: Vec<usize> = (0..groups.len()).collect();
        order.sort_by_key(|index| advances(index));
        for index in order {
            let nodes = &groups[index].1;
            let mut calls: Vec<Box<dyn BoundCall>> = Vec::new();
            while calls.len() < nodes.len().max(TOGETHER) {
                for node in nodes {
                    let plan = self.plans.plan(&*self.device, &layout.calls[*node])?;
                    calls.push(plan.bind(&storage.arguments(&program.nodes[*node].call)?)?);
                }
            }
            let count = calls.len();
            let graph: Box<dyn Graph> = match self.device.graphs() {
                Some(graphs) => graphs.capture(&mut *self.stream, calls)?,
                None => Box::new(CallList::new(calls)),
            };
            let seconds = clock.time(&*graph, &mut *self.stream, repeats)? / count as f64;
            let (call, desc) = (&program.nodes[nodes[0]].call, &layout.calls[nodes[0]]);
            figures[index] = Some(CallFigures {
                op: call.op.name().to_owned(),
                works_on: works_on(desc),
                count: nodes.len(),
                seconds,
                bytes: self.bytes(call, desc, requests, context)?,
            });
        }
        Ok(figures.into_iter().flatten().collect())
    }

    /// The bytes a call of a decode step has to move.
    fn bytes(&self, call: &Call, desc: &CallDesc, requests: usize, context: usize) -> Result<u64> {
        let body: Vec<&Op> = match &call.op {
            Op::Region(region) => region.calls().iter().map(|call| &call.op).collect(),
            op => vec![op],
        };
        let attends = body.iter().any(|op| matches!(op, Op::PagedAttention(_)));
        let looks_up = body.iter().all(|op| matches!(op, Op::Embed(_)));
        let maps = call.op.index_maps(&desc.operand_types())?;
        let mut bytes = 0;
        for ((id, operand), axes) in call.operands.iter().zip(&desc.operands).zip(&maps.operands) {
            bytes += match (id, operand) {
                (Some(id), Some(OperandDesc::Weight(weight))) if looks_up => {
                    let rows = requests.min(weight.rows());
                    if self.resident.weights.contains_key(id) { rows * weight.row_bytes()? } else { 0 }
                }
                (Some(id), Some(OperandDesc::Weight(_))) => {
                    self.resident.weights.get(id).map_or(0, |weight| weight.bytes())
                }
                (Some(id), Some(OperandDesc::Tensor(tensor))) => {
                    let slots = if attends { requests * context } else { requests };
                    self.touched(*id, axes, slots, requests).map_or(tensor.bytes()?, |touched| touched)
                }
                _ => 0,
            };
        }
        for (index, result) in desc.results.iter().enumerate() {
            if call.op.updates(index).is_none() {
                bytes += result.bytes()?;
            }
        }
        Ok(bytes as u64)
    }

    /// The bytes of a state that a call touches: so many slots of a cache, or the rows of so many requests, of which it takes
    /// one element where it picks by index; `None` if it is no such state.
    fn touched(&self, id: ValueId, axes: &[Axis], slots: usize, requests: usize) -> Option<usize> {
        // A state is updated by one call after the other: what counts is its shape.
        let value = self.plan.program.value(id).ok()?;
        let tensor = value.tensor_type()?;
        let known = |sizes: &[Size]| sizes.iter().filter_map(Size::known).product::<usize>();
        if is_cache(value) {
            let [_, heads, _, size] = tensor.shape.as_slice() else { return None };
            return Some(slots * known(&[heads.clone(), size.clone()]) * tensor.dtype.bytes());
        }
        let of_requests = tensor.shape.first().and_then(Size::symbol) == Some("requests");
        let table = of_requests && !matches!(value.origin, Origin::Input);
        let columns = tensor.shape.iter().zip(axes).skip(1);
        let taken = columns.filter(|(_, axis)| **axis != Axis::Gathered).map(|(size, _)| size.clone());
        table.then(|| requests * known(&taken.collect::<Vec<_>>()) * tensor.dtype.bytes())
    }
}

/// What a call works on, in a few words.
fn works_on(desc: &CallDesc) -> String {
    let operands = desc.operands.iter().flatten();
    let weight = operands.clone().find_map(|operand| match operand {
        OperandDesc::Weight(weight) => Some(weight.to_string()),
        OperandDesc::Tensor(_) => None,
    });
    let tensor = operands.clone().find_map(|operand| match operand {
        OperandDesc::Tensor(tensor) => Some(tensor.tensor_type().to_string()),
        OperandDesc::Weight(_) => None,
    });
    weight.or(tensor).unwrap_or_default()
}

/// Keeps time on the device, or on the host if the device keeps none.
struct Clock {
    begin: Arc<dyn Event>,
    end: Arc<dyn Event>,
}

impl Clock {
    /// The median of the seconds that a launch takes.
    fn time(&self, graph: &dyn Graph, stream: &mut dyn Stream, repeats: usize) -> Result<f64> {
        graph.launch(stream)?;
        let mut seconds = Vec::with_capacity(repeats.max(1));
        for _ in 0..repeats.max(1) {
            stream.synchronize("a call that is timed", STEP_TIMEOUT)?;
            let start = Instant::now();
            stream.record(&*self.begin)?;
            graph.launch(stream)?;
            stream.record(&*self.end)?;
            self.end.synchronize("a call that is timed", STEP_TIMEOUT)?;
            let elapsed = self.end.elapsed_since(&*self.begin)?.unwrap_or_else(|| start.elapsed());
            seconds.push(elapsed.as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[seconds.len() / 2])
    }
}
