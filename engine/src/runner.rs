//! Runs requests on a device: schedules a step, launches it, and reads its tokens while the next step runs.
//!
//! | module | holds |
//! |---|---|
//! | [`Runner`] | a loaded model with the requests that it serves |
//! | `requests`, `active_request` | requests that have not ended |
//! | `executor` | the device side: weights, states, compiled steps |
//! | `followers` | the other ranks of a model that is split over several devices |
//! | `load` | loads the weights onto the device |
//! | `step` | the run loop: launch a step, complete a step |
//! | `inputs`, `request_table` | data that the host sends before a step |
//! | `token_limits` | logit bias and token masks of requests that may not sample every token |
//! | `readback`, `hidden_states`, `pooler`, `top_tokens` | data that the host reads after a step |
//! | `call_by_call` | a step whose calls run one at a time, for measurements |
//! | `exclusive`, `step_size`, `warm_up` | work while no request runs |

mod active_request;
mod call_by_call;
mod exclusive;
mod executor;
mod followers;
mod hidden_states;
mod inputs;
mod load;
mod pooler;
mod readback;
mod request_table;
mod requests;
mod step;
mod step_size;
mod token_limits;
mod top_tokens;
mod warm_up;

use crate::{
    error::{EngineError, Result},
    kv_cache::{PageMove, PageMover, StoreCounts},
    plan::EnginePlan,
    request::{EmbeddingRequest, Pooling, Request, RequestId, RequestLimits},
    schedule::{LaunchedStep, NewSequence, ScheduledStep, Sequence, SequenceKey},
    statistics::{Phase, Statistics},
};
pub(crate) use active_request::ActiveRequest;
pub(crate) use call_by_call::CallByCall;
pub(crate) use executor::{Executor, STEP_TIMEOUT};
use hidden_states::HiddenStates;
pub(crate) use inputs::StepInputs;
use pooler::Pooler;
use readback::Readback;
use request_table::RequestTable;
pub(crate) use requests::Requests;
use std::{collections::VecDeque, time::Instant};
pub(crate) use step::DraftOutcome;
use step::InFlightStep;
use token_limits::TokenLimits;

/// A model that is loaded on a device, and the requests that it serves.
#[derive(Debug)]
pub(crate) struct Runner {
    /// Moves pages of the KV cache to the host and back, if the options ask for it. Declared first, so that it is dropped before the
    /// device memory that its calls are bound to.
    mover: Option<PageMover>,
    executor: Executor,
    requests: Requests,
    table: RequestTable,
    token_limits: TokenLimits,
    readback: Readback,
    hidden: HiddenStates,
    /// The number of token types of an encoder.
    token_types: usize,
    /// Steps in flight, the oldest first.
    in_flight: VecDeque<InFlightStep>,
    /// Outcomes of drafts that [`Self::take_draft_outcomes`] has not returned yet.
    draft_outcomes: Vec<DraftOutcome>,
    /// The steps that were launched, if they are [recorded](Self::record_steps).
    launched: Option<Vec<LaunchedStep>>,
    /// The number of completed steps.
    completed: usize,
    statistics: Statistics,
    // Reused from step to step to avoid allocations.
    scheduled: ScheduledStep,
    inputs: StepInputs,
}

impl Runner {
    /// The plan that the model was loaded by.
    pub(crate) fn plan(&self) -> &EnginePlan {
        self.executor.plan()
    }

    /// The device side.
    pub(crate) fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Same as [`Self::executor`].
    pub(crate) fn executor_mut(&mut self) -> &mut Executor {
        &mut self.executor
    }

    /// The requests that have not ended.
    pub(crate) fn requests(&self) -> &Requests {
        &self.requests
    }

    /// Same as [`Self::requests`].
    pub(crate) fn requests_mut(&mut self) -> &mut Requests {
        &mut self.requests
    }

    /// The limits that requests are checked against.
    pub(crate) fn limits(&self) -> RequestLimits {
        let plan = self.plan();
        RequestLimits {
            context: plan.context,
            vocabulary: self.requests.vocabulary(),
            block_size: plan.options.block_size,
            pages: plan.fixed.pages,
            encoder: plan.is_encoder(),
            labels: self.hidden.labels(),
        }
    }

    /// The counts so far.
    pub(crate) fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// Whether no request waits or runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.requests.scheduler().is_idle()
    }

    /// Queues a request under an id of [`Requests::next_id`].
    ///
    /// # Errors
    /// Same as [`RequestLimits::check`].
    pub(crate) fn submit(&mut self, id: RequestId, request: Request) -> Result<()> {
        let limits = self.limits();
        limits.check(&request)?;
        let limit = limits.most_tokens(&request);
        let root = self.requests.scheduler().pages().root(request.cache_salt.as_deref());
        let (tokens, priority) = (as_i32(&request.prompt).collect(), request.priority);
        // Penalties count the tokens before a row, and a constraint must accept each of them. Both would need to know which
        // proposed tokens are accepted before the step has run.
        let speculates = self.plan().options.speculation.is_some()
            && request.constraint.is_none()
            && !request.sampling.penalises();
        self.requests.add(NewSequence {
            prompt: tokens,
            limit,
            priority,
            waits_for_host: request.constraint.is_some(),
            reuses_prefix: true,
            root,
            provisional: false,
            item: ActiveRequest::new(id, limit, request, speculates),
        });
        self.statistics.requests += 1;
        self.count();
        Ok(())
    }

    /// Queues an embedding request under an id of [`Requests::next_id`].
    ///
    /// # Errors
    /// Same as [`RequestLimits::check_embedding`].
    pub(crate) fn submit_embedding(&mut self, id: RequestId, request: EmbeddingRequest) -> Result<()> {
        let limits = self.limits();
        limits.check_embedding(&request)?;
        let EmbeddingRequest { tokens, pooling, keep_length, second, priority } = request;
        self.requests.add(NewSequence {
            prompt: as_i32(&tokens).collect(),
            limit: 1,
            priority,
            waits_for_host: false,
            // The KV cache does not hold hidden states, and pooling by mean needs those of every token.
            reuses_prefix: pooling == Pooling::Last && !limits.encoder,
            root: self.requests.scheduler().pages().root(None),
            provisional: false,
            item: ActiveRequest::embedding(id, Pooler::new(tokens.len(), pooling, keep_length), second),
        });
        self.statistics.requests += 1;
        self.count();
        Ok(())
    }

    /// Enqueues the copies of pages that are to be kept outside the device.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn save_pages(&mut self) -> Result<()> {
        let mut moves = Vec::new();
        self.requests.scheduler_mut().save_pages(&mut moves);
        self.move_pages(&moves)
    }

    /// Enqueues moves of pages.
    fn move_pages(&mut self, moves: &[PageMove]) -> Result<()> {
        match &mut self.mover {
            Some(mover) => mover.run(self.executor.stream(), moves),
            None => Ok(()),
        }
    }

    /// Cancels a request. Its pages can be reused at once: steps in flight may still write to them, but complete before any
    /// step that is launched later.
    pub(crate) fn cancel(&mut self, id: RequestId) {
        if self.end(id) {
            self.statistics.cancelled += 1;
            self.count();
        }
    }

    /// Ends a request that cannot continue.
    fn fail(&mut self, id: RequestId, error: EngineError) {
        if self.end(id) {
            self.requests.add_failure(id, error);
        }
    }

    /// Ends a request. Returns whether it had not ended before.
    fn end(&mut self, id: RequestId) -> bool {
        let ended = self.requests.end(id);
        if ended && self.is_idle() {
            // Results of the steps in flight are discarded.
            self.in_flight.clear();
        }
        ended
    }

    /// Ends the request of a sequence, and updates the statistics.
    pub(crate) fn end_sequence(&mut self, key: SequenceKey) {
        if let Some(id) = self.requests.scheduler().get(key).map(|sequence| sequence.item.id) {
            self.end(id);
            self.count();
        }
    }

    /// Records the steps that are launched from now on, while none is in flight.
    pub(crate) fn record_steps(&mut self) {
        (self.launched, self.completed) = (Some(Vec::new()), 0);
    }

    /// Takes the steps that were launched since [`Self::record_steps`], and stops recording.
    pub(crate) fn take_steps(&mut self) -> Vec<LaunchedStep> {
        self.launched.take().unwrap_or_default()
    }

    /// Starts or stops recording a trace on all ranks.
    ///
    /// # Errors
    /// If requests wait or run, or a device failed.
    pub(crate) fn record_trace(&mut self, on: bool) -> Result<()> {
        self.check_idle()?;
        self.executor.record_trace(on)
    }

    /// Updates the statistics.
    fn count(&mut self) {
        let scheduler = self.requests.scheduler();
        let (pages, counts) = (scheduler.pages(), scheduler.counts());
        let statistics = &mut self.statistics;
        statistics.waiting = scheduler.waiting();
        statistics.running = scheduler.running();
        statistics.pages_in_use = pages.in_use();
        statistics.pages_cached = pages.cached();
        statistics.preemptions = counts.preemptions;
        statistics.prompt_tokens = counts.prompt_tokens;
        statistics.prefix_hit_tokens = counts.prefix_hit_tokens;
        [statistics.host_hit_tokens, statistics.folder_hit_tokens] = counts.loaded_tokens;
        if let Some(store) = self.mover.as_ref().and_then(PageMover::store) {
            let StoreCounts { host_bytes, written, damaged } = store.counts();
            statistics.prefix_host_bytes = host_bytes;
            statistics.pages_written = written;
            statistics.pages_damaged = damaged;
        }
        statistics.compiled_steps = self.executor.compiled_steps();
        statistics.streamed_bytes = self.executor.streamed_bytes();
        statistics.cache_bytes = self.executor.cache_bytes();
        let disk = self.executor.disk();
        statistics.disk_bytes = disk.map_or(0, |disk| disk.bytes);
        statistics.disk_rate = disk.and_then(|disk| disk.rate);
    }

    /// Records the time of a phase since `start`. Returns the time now.
    pub(crate) fn record_phase(&mut self, phase: Phase, start: Instant) -> Instant {
        let now = Instant::now();
        self.statistics.phases[phase as usize].record(now - start);
        now
    }
}

/// A sequence of an active request.
pub(crate) type RequestSequence = Sequence<ActiveRequest>;

/// Tokens in the device's type. They were checked against the vocabulary size, which is far below `i32::MAX`.
pub(crate) fn as_i32(tokens: &[u32]) -> impl Iterator<Item = i32> + '_ {
    tokens.iter().map(|token| *token as i32)
}
