//! Times each kind of call of a decode step, one kind at a time.
//!
//! The calls are those of the fused program. Larger regions that a device runs in one launch, such as all layers at batch 1, are
//! timed call by call, which shows where the time goes.

use crate::{
    engine::Engine,
    error::{EngineError, Result},
    plan::{Bucket, Resident, StepSegment, StepSize, StepState, chosen_experts::Experts, is_cache, plan_key},
    runner::{CallByCall, Executor, Runner, STEP_TIMEOUT, StepInputs},
};
use dsrun_core::{
    Error, Size,
    device::{Device, Event, Stream},
    graph::{CallList, Graph},
    kernels::{BoundCall, CallDesc, OperandDesc},
    op::{Axis, Op},
    program::{Call, Origin, Program, ValueId},
};
use std::{sync::Arc, time::Instant};

/// The minimum number of calls timed together: the launch overhead would dominate a single call.
const MIN_CALLS: usize = 8;

/// The least time of a measurement in seconds, within which calls are launched again: the host takes up to some hundred microseconds
/// between the first event and the first call, which would count.
const LEAST_SECONDS: f64 = 2e-3;
/// Seconds of launches before a measurement: the clock of an idle device rises slowly, and compiling a kernel leaves it idle.
const WARM_SECONDS: f64 = 0.1;
/// The most launches of a measurement.
const MOST_LAUNCHES: u32 = 64;

/// The time and traffic of the calls of one kernel plan. All layers share a plan, and each reads its own weights.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct CallFigures {
    /// The op, or the name of the region.
    pub op: String,
    /// The type of the call's weight, or else of its first operand.
    pub works_on: String,
    /// Calls in a step.
    pub count: usize,
    /// Seconds of one call.
    pub seconds: f64,
    /// Bytes that one call has to move: weights (for experts, those expected to be chosen), activations, and the accessed parts
    /// of the KV cache and the request table. Bytes that hit the device's cache take less time than from memory.
    pub bytes: u64,
}

/// The decode step to profile: requests, and tokens of context of each.
#[derive(Clone, Copy, Debug)]
struct DecodeStep {
    requests: usize,
    context: usize,
}

impl Engine {
    /// Times every distinct kernel plan of a decode step of `requests` requests with `context` tokens each. All calls of a plan
    /// run in sequence, `repeats` times; the median is reported.
    ///
    /// # Errors
    /// If requests are running, there are too few pages for such requests, or the device failed.
    pub fn time_calls(
        &mut self,
        requests: usize,
        context: usize,
        repeats: usize,
    ) -> Result<Vec<CallFigures>> {
        let runner = self.runner_mut();
        let plan = runner.plan();
        if requests == 0 || requests > plan.fixed.requests {
            let rule = format!("must be from 1 to {}", plan.fixed.requests);
            return Err(EngineError::option("batch", requests, rule));
        }
        if context >= plan.context {
            let rule = format!("must be below the context of {}", plan.context);
            return Err(EngineError::option("context", context, rule));
        }
        let block = plan.options.block_size;
        let tokens = (context + 1).next_multiple_of(block) * requests;
        let available = runner.requests().scheduler().pages().total() * block;
        if runner.is_idle() && tokens > available {
            let rule = format!("needs {tokens} tokens of KV cache, but there are {available}");
            return Err(EngineError::option("batch", requests, rule));
        }
        let step = DecodeStep { requests, context };
        runner.with_pages(tokens, |runner, pages| time_calls(runner, pages, step, repeats))
    }
}

fn time_calls(
    runner: &mut Runner,
    pages: &[i32],
    decode: DecodeStep,
    repeats: usize,
) -> Result<Vec<CallFigures>> {
    let DecodeStep { requests, context } = decode;
    let vocabulary = runner.requests().vocabulary();
    let mut inputs = StepInputs::default();
    for (slot, pages) in pages.chunks(pages.len() / requests).enumerate() {
        runner.place_alone(slot, context, pages)?;
        let last = (slot % vocabulary) as i32;
        runner.executor_mut().upload_state_row(StepState::LastToken, slot, &last.to_le_bytes())?;
        inputs.push_last_token(slot);
        inputs.sample_last(slot, 1);
    }
    let executor = runner.executor_mut();
    let bucket = Bucket::for_step(requests, requests, requests, executor.plan().limits);
    let program = executor.plan().programs.of(bucket).clone();
    let step = CallByCall::new(executor, &program, bucket, 0)?;
    step.upload(executor.stream(), &inputs)?;

    // Run one whole step in order first, so that every call has valid operands.
    let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
    for node in step.nodes(&[StepSegment::Forward, StepSegment::Sample])? {
        step.bind(executor, node)?.enqueue(executor.stream())?;
        let key = plan_key(step.call(node).1);
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, nodes)) => nodes.push(node),
            None => groups.push((key, vec![node])),
        }
    }
    executor.synchronize("a step")?;

    let clock = Clock::new(&**executor.device())?;
    let mut figures: Vec<Option<CallFigures>> = vec![None; groups.len()];
    let advances = |index: &usize| {
        matches!(program.nodes[groups[*index].1[0]].call.op, Op::PrepareStep(_) | Op::CommitTokens(_))
    };
    // Calls that update the request table are timed last, because the others depend on it.
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by_key(|index| advances(index));
    for index in order {
        let nodes = &groups[index].1;
        let mut calls: Vec<Box<dyn BoundCall>> = Vec::new();
        while calls.len() < nodes.len().max(MIN_CALLS) {
            for node in nodes {
                calls.push(step.bind(executor, *node)?);
            }
        }
        let count = calls.len();
        // Each of the calls that update the request table moves the requests on.
        let most = if advances(&index) { 1 } else { MOST_LAUNCHES };
        let seconds = clock.time_calls(executor, calls, repeats, most)? / count as f64;
        let (node, desc) = step.call(nodes[0]);
        figures[index] = Some(CallFigures {
            op: node.call.op.name().to_owned(),
            works_on: works_on(desc),
            count: nodes.len(),
            seconds,
            bytes: call_bytes(&program, executor.resident(), &node.call, desc, decode)?,
        });
    }
    Ok(figures.into_iter().flatten().collect())
}

/// The bytes that a call of a decode step has to move.
fn call_bytes(
    program: &Program,
    resident: &Resident,
    call: &Call,
    desc: &CallDesc,
    decode: DecodeStep,
) -> Result<u64> {
    let DecodeStep { requests, context } = decode;
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
            (Some(id), Some(OperandDesc::Weight(weight))) => {
                let packed = resident.weights.get(&program.value(*id)?.name);
                match packed {
                    None => 0,
                    Some(_) if looks_up => requests.min(weight.rows()) * weight.row_bytes()?,
                    Some(packed) => match body[..] {
                        [Op::GroupedLinear(op)] => chosen_bytes(packed.bytes(), op.count, desc, requests)?,
                        _ => packed.bytes(),
                    },
                }
            }
            (Some(id), Some(OperandDesc::Tensor(tensor))) => {
                let slots = if attends { requests * context } else { requests };
                let touched = touched_bytes(program, *id, axes, slots, requests);
                touched.map_or(tensor.bytes()?, |touched| touched)
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

/// The expected bytes of the experts that are chosen by at least one token of a step, where `bytes` is the size of all experts.
/// Routers are assumed to choose all experts equally often.
fn chosen_bytes(bytes: usize, experts: u32, desc: &CallDesc, requests: usize) -> Result<usize> {
    let slots = match desc.operands.get(2) {
        Some(Some(OperandDesc::Tensor(chosen))) => chosen.shape[1],
        _ => return Err(Error::internal("a linear layer of experts without their table").into()),
    };
    let experts = Experts { count: experts as usize, slots };
    Ok((bytes as f64 * experts.expected_share(requests)) as usize)
}

/// The bytes of a state that a call accesses: `tokens` slots of a cache, or the rows of the step's requests in the request table
/// (one element per row where it is indexed by data). `None` for other values.
fn touched_bytes(
    program: &Program,
    id: ValueId,
    axes: &[Axis],
    slots: usize,
    requests: usize,
) -> Option<usize> {
    // Every update of a state makes a new value, so states are recognised by their shape.
    let value = program.value(id).ok()?;
    let tensor = value.tensor_type()?;
    let known = |sizes: &[Size]| sizes.iter().filter_map(Size::known).product::<usize>();
    if is_cache(value) {
        let [_, heads, _, size] = tensor.shape.as_slice() else { return None };
        return Some(slots * known(&[heads.clone(), size.clone()]) * tensor.dtype.bytes());
    }
    let is_of_requests = StepSize::of_rows(value) == Some(StepSize::Requests);
    let is_table = is_of_requests && !matches!(value.origin, Origin::Input);
    let columns = tensor.shape.iter().zip(axes).skip(1);
    let read = columns.filter(|(_, axis)| **axis != Axis::Gathered).map(|(size, _)| size.clone());
    is_table.then(|| requests * known(&read.collect::<Vec<_>>()) * tensor.dtype.bytes())
}

/// The type of a call's weight, or else of its first tensor.
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

/// Measures time on the device, or on the host if the device has no clock.
struct Clock {
    begin: Arc<dyn Event>,
    end: Arc<dyn Event>,
}

impl Clock {
    fn new(device: &dyn Device) -> Result<Self> {
        Ok(Self { begin: device.event()?, end: device.event()? })
    }

    /// The median time in seconds of a set of calls that are launched together, at most `most` times in a measurement.
    fn time_calls(
        &self,
        executor: &mut Executor,
        calls: Vec<Box<dyn BoundCall>>,
        repeats: usize,
        most: u32,
    ) -> Result<f64> {
        let (device, stream, _) = executor.device_stream_plans();
        let graph: Box<dyn Graph> = match device.graphs() {
            Some(graphs) => graphs.capture(stream, calls)?,
            None => Box::new(CallList::new(calls)),
        };
        graph.launch(stream)?;
        // These measurements are only for the clock, and for the number of launches of the others.
        let (start, mut launches) = (Instant::now(), 1);
        loop {
            let once = self.time(&*graph, stream, launches)?;
            launches = ((LEAST_SECONDS / once).ceil() as u32).clamp(1, most);
            if most == 1 || start.elapsed().as_secs_f64() >= WARM_SECONDS {
                break;
            }
        }
        let mut seconds = Vec::with_capacity(repeats.max(1));
        for _ in 0..repeats.max(1) {
            seconds.push(self.time(&*graph, stream, launches)?);
        }
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[seconds.len() / 2])
    }

    /// The time in seconds of one of several launches.
    fn time(&self, graph: &dyn Graph, stream: &mut dyn Stream, launches: u32) -> Result<f64> {
        stream.synchronize("a call that is timed", STEP_TIMEOUT)?;
        let start = Instant::now();
        stream.record(&*self.begin)?;
        for _ in 0..launches {
            graph.launch(stream)?;
        }
        stream.record(&*self.end)?;
        self.end.synchronize("a call that is timed", STEP_TIMEOUT)?;
        let elapsed = self.end.elapsed_since(&*self.begin)?.unwrap_or_else(|| start.elapsed());
        Ok(elapsed.as_secs_f64() / f64::from(launches))
    }
}
