//! Simulates a pipeline: the engine's real scheduler, with a virtual clock instead of devices.
//!
//! The loop is that of the engine: it launches steps until one per stage is in flight, then completes the oldest. Nothing is
//! computed, so simulating thousands of steps takes milliseconds.

use super::timeline::Timeline;
use crate::{
    error::Result,
    kv_cache::Prefix,
    options::EngineOptions,
    passes::shard::MeshCosts,
    plan::EnginePlan,
    schedule::{Capacity, LaunchedStep, NewSequence, ScheduledStep, Scheduler, SequenceKey},
};
use std::collections::VecDeque;

/// A request of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulatedRequest {
    /// Tokens of its prompt.
    pub prompt: usize,
    /// Tokens of its answer.
    pub answer: usize,
}

/// The steps, in order, that the engine would launch for requests that all arrive at once.
///
/// `longest` is the model's own context. `costs` are those of the devices; costs in the options take precedence.
///
/// # Errors
/// If an option is out of range, or a request does not fit.
pub fn launched_steps(
    requests: &[SimulatedRequest],
    longest: usize,
    options: &EngineOptions,
    costs: &MeshCosts,
) -> Result<Vec<LaunchedStep>> {
    options.validate()?;
    let (context, fixed, limits) = EnginePlan::sizes(longest, options)?;
    let costs = options.shard.costs.as_ref().unwrap_or(costs);
    let depth = EnginePlan::steps_in_flight(options);
    let mut scheduler: Scheduler<usize> = Scheduler::new(Capacity {
        tokens: EnginePlan::micro_batch_tokens(options, limits.tokens, fixed.requests, costs),
        slots: fixed.requests,
        pages: fixed.pages,
        block_size: options.block_size,
        host_pages: 0,
        keep_prefixes: false,
        prompts_first: !options.split_prompts,
        tokens_from_host: options.pipeline.count() > 1,
        micro_batches: EnginePlan::micro_batches(options),
    });
    for (item, SimulatedRequest { prompt, answer }) in requests.iter().copied().enumerate() {
        if prompt == 0 || answer == 0 || prompt + answer > context {
            let rule = format!("must have a prompt and an answer, together at most {context} tokens");
            let value = format!("{prompt} and {answer} tokens");
            return Err(crate::EngineError::Option { option: "request", value, rule });
        }
        scheduler.add(NewSequence {
            prompt: vec![0; prompt],
            limit: answer,
            priority: 0,
            waits_for_host: false,
            reuses_prefix: false,
            root: Prefix::EMPTY,
            provisional: false,
            item,
        });
    }
    let (mut steps, mut completed) = (Vec::new(), 0);
    let mut in_flight: VecDeque<Vec<SequenceKey>> = VecDeque::new();
    let mut scheduled = ScheduledStep::default();
    while !scheduler.is_idle() {
        while in_flight.len() < depth {
            scheduler.plan(&mut scheduled);
            if scheduled.sequences.is_empty() {
                break;
            }
            let sampled = scheduled.sequences.iter().filter(|part| part.samples > 0).map(|part| part.key);
            in_flight.push_back(sampled.collect());
            let (tokens, sequences) = (scheduled.tokens, scheduled.sequences.len());
            steps.push(LaunchedStep { tokens, sequences, completed });
        }
        let Some(oldest) = in_flight.pop_front() else {
            return Err(dsrun_core::Error::internal("requests wait, and none of them can run").into());
        };
        completed += 1;
        for key in oldest {
            scheduler.accept_tokens(key, [0]);
            let ended = scheduler.get(key).is_some_and(|sequence| {
                sequence.generated() >= requests.get(sequence.item).map_or(0, |request| request.answer)
            });
            if ended {
                scheduler.end(key);
            }
        }
    }
    Ok(steps)
}

/// The timeline of these requests, where `time` returns the time of a step on a stage.
///
/// # Errors
/// Same as [`launched_steps`].
pub fn simulate(
    requests: &[SimulatedRequest],
    longest: usize,
    options: &EngineOptions,
    costs: &MeshCosts,
    time: &dyn Fn(usize, &LaunchedStep) -> f64,
) -> Result<Timeline> {
    let steps = launched_steps(requests, longest, options, costs)?;
    Ok(Timeline::replay(&steps, options.pipeline.count(), time))
}
