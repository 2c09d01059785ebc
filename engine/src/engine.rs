//! The engine: takes requests, runs steps, gives tokens.

use crate::{
    error::{EngineError, Result},
    kv_cache::SwapSpace,
    memory::MemoryPlan,
    plan::{Bucket, CompiledStep, PlanCache, Resident, Shared},
    plan::{EnginePlan, is_cache},
    request::{Constraint, Request, RequestId, RequestIds, RequestLimits},
    runner::{
        hidden_states::{Chunk, HiddenStates},
        inputs::StepInputs,
        pooler::Pooler,
        readback::{Handover, Parcel},
        request_table::RequestTable,
    },
    sampling::SamplingOptions,
    schedule::{Capacity, Entry, Key, Scheduler, StepPlan},
    speculation::{Drafter, Proposer, Speculation},
    statistics::Statistics,
};
use dsrun_core::{
    Error,
    device::{BufferSlice, Device, Stream},
    op::IN_PROMPT,
    program::Program,
};
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

/// How long a step may take before the device counts as hung.
pub(crate) const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// The segment of a program that samples with a bias and a mask.
pub(crate) const LIMITED: &str = "sample_limited";

/// What the engine keeps of a request.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) id: RequestId,
    pub(crate) limit: usize,
    pub(crate) sampling: SamplingOptions,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) ignore_end: bool,
    pub(crate) min_tokens: usize,
    pub(crate) bias: Vec<(u32, f32)>,
    /// How many of the likeliest tokens to report.
    pub(crate) top: usize,
    pub(crate) constraint: Option<Box<dyn Constraint>>,
    /// What sums up its hidden states, if it is a request for a vector.
    pub(crate) pooler: Option<Pooler>,
    /// What proposes its next tokens, if it speculates.
    pub(crate) proposer: Option<Proposer>,
}

/// A step under way.
#[derive(Debug)]
pub(crate) struct Flight {
    /// Its tokens.
    pub(crate) parcel: Parcel,
    /// Whose they are, row by row. A request that has ended meanwhile gets none.
    pub(crate) requests: Vec<Key>,
    /// Those of them whose logits are sent along.
    pub(crate) logits: Vec<usize>,
    /// Whose hidden states are sent along.
    pub(crate) chunks: Vec<Chunk>,
}

/// Runs a model on a device.
#[derive(Debug)]
pub struct Engine {
    // Dropped first: bound calls hold buffers and weights.
    pub(crate) steps: HashMap<Bucket, CompiledStep>,
    pub(crate) swap: Option<SwapSpace>,
    pub(crate) plans: PlanCache,
    pub(crate) stream: Box<dyn Stream>,
    pub(crate) resident: Resident,
    pub(crate) shared: Shared,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) plan: EnginePlan,
    pub(crate) states: HashMap<String, BufferSlice>,
    pub(crate) table: RequestTable,
    pub(crate) handover: Handover,
    pub(crate) scheduler: Scheduler<Running>,
    /// The requests that have not ended.
    pub(crate) keys: HashMap<RequestId, Key>,
    /// Requests that could not go on, and why, until somebody asks.
    pub(crate) failures: Vec<(RequestId, EngineError)>,
    /// Vectors that are there, until somebody asks.
    pub(crate) embeddings: Vec<(RequestId, Vec<f32>)>,
    /// A second model that proposes tokens.
    pub(crate) drafter: Option<Drafter>,
    pub(crate) hidden: HiddenStates,
    /// Rows of the request table that have a bias.
    pub(crate) biased: Vec<bool>,
    /// Steps under way, the oldest first.
    pub(crate) flights: VecDeque<Flight>,
    pub(crate) statistics: Statistics,
    pub(crate) ids: RequestIds,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) vocabulary: usize,
    // Kept from step to step for their memory.
    pub(crate) step_plan: StepPlan,
    pub(crate) inputs: StepInputs,
    pub(crate) staging: Vec<u8>,
    /// What stands at the beginning of the steps' input buffer.
    pub(crate) brought: Vec<u8>,
    pub(crate) mask: Vec<u32>,
}

/// What [`EnginePlan::load`] brings to an engine.
pub(crate) struct Loaded {
    pub(crate) stream: Box<dyn Stream>,
    pub(crate) resident: Resident,
    pub(crate) shared: Shared,
    pub(crate) table: RequestTable,
    pub(crate) drafter: Option<Drafter>,
    /// The model's tokens that end an answer.
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) vocabulary: usize,
}

impl Engine {
    pub(crate) fn new(plan: EnginePlan, device: Arc<dyn Device>, loaded: Loaded) -> Result<Self> {
        let Loaded { stream, resident, shared, table, drafter, stop_ids, vocabulary } = loaded;
        let mut states = HashMap::new();
        let mut caches = Vec::new();
        for (id, value) in plan.program.values_from(|_| true) {
            let Some(memory) = resident.tensors.get(&id) else { continue };
            states.insert(value.name.clone(), memory.clone());
            if is_cache(value) {
                caches.push((plan.cache(value)?, memory.clone()));
            }
        }
        let mut plans = PlanCache::default();
        let host_pages = plan.host_pages();
        let swap = match host_pages {
            0 => None,
            pages => Some(SwapSpace::new(&*device, &mut plans, &caches, pages)?),
        };
        let capacity = Capacity {
            tokens: plan.limits.tokens,
            slots: plan.fixed.requests,
            pages: plan.fixed.pages,
            block_size: plan.options.block_size,
            host_pages,
            keep_prefixes: plan.options.prefix_cache,
            prompts_first: !plan.options.split_prompts,
        };
        let mut engine = Self {
            steps: HashMap::new(),
            swap,
            plans,
            handover: Handover::new(&*device, plan.limits.rows)?,
            scheduler: Scheduler::new(capacity),
            keys: HashMap::new(),
            failures: Vec::new(),
            embeddings: Vec::new(),
            drafter,
            hidden: HiddenStates::new(&plan.program)?,
            biased: vec![false; plan.fixed.requests],
            flights: VecDeque::new(),
            statistics: Statistics { pages_total: plan.fixed.pages, ..Statistics::default() },
            ids: RequestIds::default(),
            step_plan: StepPlan::default(),
            inputs: StepInputs::default(),
            staging: Vec::new(),
            brought: Vec::new(),
            mask: Vec::new(),
            stream,
            resident,
            shared,
            device,
            plan,
            states,
            table,
            stop_ids,
            vocabulary,
        };
        // What ends a request differs between requests, so the host decides, a step later than the device could.
        let stop_ids = engine.state("stop_ids")?;
        engine.stream.upload(&(-1i32).to_le_bytes(), &stop_ids)?;
        if engine.plan.options.tune_step {
            engine.tune_step()?;
        }
        Ok(engine)
    }

    /// What was allocated.
    pub fn memory(&self) -> &MemoryPlan {
        self.plan.memory()
    }

    /// The program that runs, after all passes.
    pub fn program(&self) -> &Program {
        &self.plan.program
    }

    /// Tokens a request may have, prompt and answer together.
    pub fn context(&self) -> usize {
        self.plan.context
    }

    /// The device it runs on.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Tokens that end an answer.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// Pages of the KV cache that requests hold.
    pub fn pages_in_use(&self) -> usize {
        self.scheduler.pages().in_use()
    }

    /// Tokens that a step brings at most.
    pub fn step_tokens(&self) -> usize {
        self.scheduler.capacity().tokens
    }

    /// What a request has to keep to.
    pub fn limits(&self) -> RequestLimits {
        RequestLimits {
            context: self.plan.context,
            vocabulary: self.vocabulary,
            block_size: self.plan.options.block_size,
            pages: self.plan.fixed.pages,
        }
    }

    /// What was counted so far.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    pub(crate) fn ids(&self) -> &RequestIds {
        &self.ids
    }

    /// Takes a request. It runs as soon as a place in the request table and pages for its prompt are free.
    ///
    /// # Errors
    /// As [`RequestLimits::check`].
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        let id = self.ids.next();
        self.submit_as(id, request)?;
        Ok(id)
    }

    /// Takes a request under a number from [`Self::ids`].
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub(crate) fn submit_as(&mut self, id: RequestId, request: Request) -> Result<()> {
        let limits = self.limits();
        limits.check(&request)?;
        let limit = limits.most_tokens(&request);
        let Request { prompt, sampling, stop_ids, ignore_end, priority, constraint, .. } = request;
        // Penalties count the tokens before, and a constraint has to accept them: both would need to know which are right.
        let speculates = constraint.is_none() && !sampling.penalises();
        let speculation = self.plan.options.speculation.filter(|_| speculates);
        let key = self.scheduler.add(Entry {
            prompt: as_i32(&prompt).collect(),
            limit,
            priority,
            waits: constraint.is_some(),
            whole: false,
            guesses: false,
            item: Running {
                id,
                limit,
                sampling,
                stop_ids,
                ignore_end,
                min_tokens: request.min_tokens,
                bias: request.logit_bias,
                top: request.top_log_probabilities,
                constraint,
                pooler: None,
                proposer: speculation.map(Speculation::proposer),
            },
        });
        self.keys.insert(id, key);
        self.statistics.requests += 1;
        self.count();
        Ok(())
    }

    /// Ends a request. Its pages are free at once: what is under way still writes to them, but before anything that is
    /// launched from here on.
    pub fn cancel(&mut self, id: RequestId) {
        if self.end(id) {
            self.statistics.cancelled += 1;
            self.count();
        }
    }

    /// Requests that could not go on since this was last asked, and why. The others are not concerned.
    pub fn take_failures(&mut self) -> Vec<(RequestId, EngineError)> {
        std::mem::take(&mut self.failures)
    }

    /// Ends a request that cannot go on.
    pub(crate) fn fail(&mut self, id: RequestId, error: EngineError) {
        if self.end(id) {
            self.failures.push((id, error));
        }
    }

    /// Whether there was such a request.
    pub(crate) fn end(&mut self, id: RequestId) -> bool {
        let Some(key) = self.keys.remove(&id) else { return false };
        self.scheduler.end(key);
        if let Some(drafter) = &mut self.drafter {
            drafter.release(key);
        }
        if self.scheduler.is_idle() {
            // What is under way is for nobody.
            self.flights.clear();
        }
        true
    }

    /// Notes what is held now.
    pub(crate) fn count(&mut self) {
        let (pages, counts) = (self.scheduler.pages(), self.scheduler.counts());
        let statistics = &mut self.statistics;
        statistics.waiting = self.scheduler.waiting();
        statistics.running = self.scheduler.running();
        statistics.pages_in_use = pages.in_use();
        statistics.pages_cached = pages.cached();
        statistics.preemptions = counts.preemptions;
        statistics.prompt_tokens = counts.prompt_tokens;
        statistics.prefix_hit_tokens = counts.prefix_hit_tokens;
    }

    pub(crate) fn state(&self, name: &str) -> Result<BufferSlice> {
        let state = self.states.get(name).cloned();
        Ok(state.ok_or_else(|| Error::internal(format!("the program has no state `{name}`")))?)
    }

    /// Sets the counts of tokens in a row of the request table, for penalties: those of a request that was under way already,
    /// or has a prompt whose beginning it does not bring itself.
    pub(crate) fn set_counts(&mut self, slot: usize, prompt: &[i32], generated: &[i32]) -> Result<()> {
        let bytes = self.vocabulary * size_of::<i32>();
        let row = self.state("counts")?.slice(slot * bytes, bytes)?;
        if prompt.is_empty() && generated.is_empty() {
            return Ok(self.stream.fill(&row, 0)?);
        }
        let mut counts = vec![0i32; self.vocabulary];
        for token in prompt {
            counts[*token as usize] |= IN_PROMPT;
        }
        for token in generated {
            counts[*token as usize] += 1;
        }
        Ok(self.stream.upload(bytemuck::cast_slice(&counts), &row)?)
    }
}

pub(crate) fn as_i32(tokens: &[u32]) -> impl Iterator<Item = i32> + '_ {
    // Tokens were checked against the vocabulary, which is far below `i32::MAX`.
    tokens.iter().map(|token| *token as i32)
}
