//! The engine: takes requests, runs steps, returns tokens.

use crate::{
    error::{EngineError, Result},
    memory::{Bytes, MemoryPlan},
    plan::{DraftPlan, EnginePlan},
    request::{EmbeddingRequest, Request, RequestId, RequestIds, RequestLimits, TokenEvent},
    runner::Runner,
    schedule::LaunchedStep,
    speculation::{DraftModel, Speculator},
    statistics::Statistics,
};
use dsrun_core::{device::Device, host_memory, program::Program};
use dsrun_models::model::Model;
use std::sync::Arc;

/// Runs a model on a device.
#[derive(Debug)]
pub struct Engine {
    /// Runs the requests: scheduler, KV cache pages, compiled steps, request table, readback of tokens, statistics.
    runner: Runner,
    /// Proposes tokens for speculative decoding, if the options enable it.
    speculator: Option<Speculator>,
}

impl EnginePlan {
    /// Allocates the planned memory and loads the weights onto the device. `progress` receives the bytes of weights loaded so
    /// far, and of all weights.
    ///
    /// # Errors
    /// [`EngineError::DoesNotFit`] if there is too little memory; those of reading the model and of the device.
    pub fn load(
        mut self,
        model: &Model,
        device: Arc<dyn Device>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Engine> {
        self.check_memory()?;
        let (own, all) = (self.memory().own_weights(), self.memory().all_weights());
        let (speculation, draft) = (self.options.speculation, self.draft.take());
        let runner = Runner::load(self, model, device.clone(), &mut |loaded| progress(loaded, all))?;
        let draft = match draft {
            None => None,
            Some(DraftPlan { model, plan, tokens }) => {
                let runner = Runner::load(*plan, &model, device, &mut |loaded| progress(own + loaded, all))?;
                Some(DraftModel::new(runner, tokens))
            }
        };
        let speculator = speculation.map(|speculation| Speculator::new(speculation, draft));
        Ok(Engine { runner, speculator })
    }

    /// Runs the commands of process 0 on the ranks of this process, until process 0 drops its engine. The plan must
    /// come from [`Self::on_processes`], on a process other than 0. `progress` is that of [`Self::load`].
    ///
    /// # Errors
    /// Same as [`Self::load`]; if any rank or process fails, every process returns an error.
    pub fn follow(
        self,
        model: &Model,
        device: Arc<dyn Device>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<()> {
        self.check_memory()?;
        let all = self.memory().all_weights();
        Runner::follow(self, model, device, &mut |loaded| progress(loaded, all))
    }

    /// # Errors
    /// [`EngineError::DoesNotFit`] if a rank has too little memory; the other processes get the error too.
    fn check_memory(&self) -> Result<()> {
        let sum = |of: fn(&MemoryPlan) -> u64| self.memory_of_ranks().map(of).sum::<u64>();
        let (weights, cache) = (sum(|memory| memory.host), sum(|memory| memory.kv_host));
        let beside = sum(|memory| memory.host + memory.swap + memory.prefix_host);
        let in_host = match host_memory::available() {
            Some(available) if weights > available => {
                Err(EngineError::HostMemory { needed: weights, available })
            }
            Some(available) if cache > 0 && cache + beside > available => {
                Err(EngineError::HostCache { needed: cache, available: available.saturating_sub(beside) })
            }
            _ => Ok(()),
        };
        let lacking = self.memory_of_ranks().find_map(|memory| Some((memory.missing()?, memory)));
        let fits = match lacking {
            None => Ok(()),
            Some((missing, plan)) => Err(EngineError::DoesNotFit { missing, plan: Box::new(plan.clone()) }),
        };
        let prefixes = self.options.prefix_store.host_bytes;
        if let Some(available) = host_memory::available().filter(|available| prefixes > *available) {
            let rule = format!("must be at most the available host memory, {}", Bytes(available));
            return Err(EngineError::option("prefix-cache-host", Bytes(prefixes), rule));
        }
        let fits = fits.and(in_host);
        match &self.processes {
            Some(processes) => processes.checked(fits),
            None => fits,
        }
    }
}

impl Engine {
    /// The memory that was allocated.
    pub fn memory(&self) -> &MemoryPlan {
        self.runner.plan().memory()
    }

    /// The number of ranks that the model is split over.
    pub fn ranks(&self) -> usize {
        self.runner.plan().ranks()
    }

    /// Checks, without waiting, whether the other ranks still run.
    ///
    /// # Errors
    /// The error of the rank that failed first.
    pub(crate) fn check_ranks(&self) -> Result<()> {
        self.runner.executor().check_ranks()
    }

    /// Ends every wait for this rank, which cannot go on. The engine can only be dropped afterwards.
    pub(crate) fn abandon(&self, reason: &str) {
        self.runner.executor().abandon(reason);
    }

    /// The program of decode-only steps, after all passes.
    pub fn program(&self) -> &Program {
        self.runner.plan().program()
    }

    /// Tokens a request may have, prompt and answer together.
    pub fn context(&self) -> usize {
        self.runner.plan().context
    }

    /// The device it runs on.
    pub fn device(&self) -> &Arc<dyn Device> {
        self.runner.executor().device()
    }

    /// The model's tokens that end an answer.
    pub fn stop_ids(&self) -> &[u32] {
        self.runner.requests().stop_ids()
    }

    /// Whether no request waits or runs.
    pub fn is_idle(&self) -> bool {
        self.runner.is_idle()
    }

    /// Pages of the KV cache that requests hold.
    pub fn pages_in_use(&self) -> usize {
        self.runner.requests().scheduler().pages().in_use()
    }

    /// The maximum number of tokens of a step.
    pub fn step_tokens(&self) -> usize {
        self.runner.requests().scheduler().capacity().tokens
    }

    /// The limits that requests are checked against.
    pub fn limits(&self) -> RequestLimits {
        self.runner.limits()
    }

    /// The counts so far.
    pub fn statistics(&self) -> &Statistics {
        self.runner.statistics()
    }

    /// The counts of the draft model that proposes tokens, if there is one.
    pub fn draft_statistics(&self) -> Option<&Statistics> {
        self.speculator.as_ref()?.draft().map(|draft| draft.runner().statistics())
    }

    /// The source of request ids.
    pub(crate) fn ids(&self) -> &RequestIds {
        self.runner.requests().ids()
    }

    /// The runner, for work while no request runs.
    pub(crate) fn runner_mut(&mut self) -> &mut Runner {
        &mut self.runner
    }

    /// Queues a request. It starts when a row of the request table and KV cache pages for its prompt are free.
    ///
    /// # Errors
    /// Same as [`RequestLimits::check`].
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        let id = self.runner.requests().next_id();
        self.submit_as(id, request)?;
        Ok(id)
    }

    /// Queues a request under an id from [`Self::ids`].
    ///
    /// # Errors
    /// Same as [`Self::submit`].
    pub(crate) fn submit_as(&mut self, id: RequestId, request: Request) -> Result<()> {
        self.runner.submit(id, request)
    }

    /// Queues an embedding request, whose result [`Self::take_embeddings`] returns. Its tokens are processed like those of prompts,
    /// so it may share steps and pages with other requests. A text may be as long as the context.
    ///
    /// # Errors
    /// Same as [`RequestLimits::check_embedding`].
    pub fn submit_embedding(&mut self, request: EmbeddingRequest) -> Result<RequestId> {
        let id = self.runner.requests().next_id();
        self.submit_embedding_as(id, request)?;
        Ok(id)
    }

    /// Queues an embedding request under an id from [`Self::ids`].
    ///
    /// # Errors
    /// Same as [`Self::submit_embedding`].
    pub(crate) fn submit_embedding_as(&mut self, id: RequestId, request: EmbeddingRequest) -> Result<()> {
        self.runner.submit_embedding(id, request)
    }

    /// Cancels a request. Its pages can be reused at once: steps in flight may still write to them, but complete before any
    /// step that is launched later.
    pub fn cancel(&mut self, id: RequestId) {
        self.runner.cancel(id);
        if let Some(speculator) = &mut self.speculator {
            speculator.forget_ended(&mut self.runner);
        }
    }

    /// Whether a request has been in a step and has not ended.
    pub(crate) fn has_started(&self, id: RequestId) -> bool {
        self.runner.requests().has_started(id)
    }

    /// Completes a step and returns its tokens: one of every request that generates or whose prompt is processed, and after it the
    /// accepted tokens of its draft. A step that processes chunks of prompts only has none.
    ///
    /// The next step is launched before the host waits for the tokens, if the device is still busy and
    /// [`EngineOptions::launch_ahead`](crate::EngineOptions::launch_ahead) allows it.
    ///
    /// # Errors
    /// If the device failed. The running requests are lost then.
    pub fn step(&mut self) -> Result<Vec<TokenEvent>> {
        let Some(speculator) = &mut self.speculator else { return self.runner.step() };
        speculator.propose(&mut self.runner)?;
        let events = self.runner.step()?;
        speculator.learn(&mut self.runner);
        Ok(events)
    }

    /// Records the steps that are launched from now on, for a [timeline](crate::planner::timeline::Timeline).
    ///
    /// # Errors
    /// If requests wait or run.
    pub fn record_steps(&mut self) -> Result<()> {
        self.runner.check_idle()?;
        self.runner.record_steps();
        Ok(())
    }

    /// Returns the steps launched since [`Self::record_steps`], and stops recording.
    pub fn take_steps(&mut self) -> Vec<LaunchedStep> {
        self.runner.take_steps()
    }

    /// Starts or stops recording what each rank runs, if the plan has a [trace](EnginePlan::trace). Starting again counts steps from
    /// 0. Other ranks end their part of the trace later, at the latest when the engine is dropped.
    ///
    /// # Errors
    /// If requests wait or run, or a device failed.
    pub fn record_trace(&mut self, on: bool) -> Result<()> {
        self.runner.record_trace(on)
    }

    /// Takes the errors of requests that could not continue since the last call. Other requests are not affected.
    pub fn take_failures(&mut self) -> Vec<(RequestId, EngineError)> {
        self.runner.requests_mut().take_failures()
    }

    /// Takes the embeddings that were finished since the last call, scaled to length 1 unless the request asked otherwise.
    pub fn take_embeddings(&mut self) -> Vec<(RequestId, Vec<f32>)> {
        self.runner.requests_mut().take_embeddings()
    }

    /// Compiles the steps of every size that requests may need, those of a draft model included, and launches each once with
    /// extents of 0, so that no request waits for a step to be compiled or for a kernel to be loaded. `progress` receives the
    /// number of steps that are ready, and of all steps. Returns the number of steps.
    ///
    /// Steps are compiled one after the other. [`EnginePlan::compile_ahead`] builds their kernels with several threads before.
    ///
    /// # Errors
    /// If requests are running, or the device failed.
    pub fn warm_up(&mut self, progress: &mut dyn FnMut(usize, usize)) -> Result<usize> {
        let mut draft = self.speculator.as_mut().and_then(Speculator::draft_mut);
        let own = self.runner.buckets().len();
        let total = own + draft.as_ref().map_or(0, |draft| draft.runner().buckets().len());
        self.runner.warm_up(&mut |done| progress(done, total))?;
        if let Some(draft) = &mut draft {
            draft.runner_mut().warm_up(&mut |done| progress(own + done, total))?;
        }
        Ok(total)
    }
}
