//! Replicas: several engines with the same model.
//!
//! A request goes to the engine that has processed the beginning of its prompt before, whose cache then saves work, unless that
//! engine is clearly busier than the others; otherwise it goes to the least busy engine. An engine that has failed, or whose step does
//! not end, gets no requests while another one serves. Requests that a failed engine has not begun move to another.

mod moving_stream;
mod seen;

use dsrun_engine::{
    EmbeddingRequest, Request, RequestLimits, Statistics,
    service::{Admission, Handle, PendingEmbedding, ServiceError, ServicePhase, TokenStream},
};
use futures_util::future::join_all;
pub(crate) use moving_stream::MovingStream;
use seen::Seen;
use std::{
    sync::{
        Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

/// Engines with the same model and the same options; at least one.
#[derive(Debug)]
pub(crate) struct Replicas {
    engines: Vec<RwLock<Handle>>,
    limits: RequestLimits,
    stop_ids: Vec<u32>,
    seen: Mutex<Seen>,
    /// The longest step of an engine that serves.
    step_timeout: Duration,
    draining: AtomicBool,
    /// What engines had counted that have been replaced.
    replaced: Mutex<Statistics>,
    failures: AtomicU64,
    moved: AtomicU64,
}

/// The state of an engine, as health checks report it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct EngineHealth {
    /// Whether it gets requests.
    pub(crate) serving: bool,
    /// The time since its present step began; `None` between steps.
    pub(crate) step_age: Option<Duration>,
}

impl Replicas {
    /// These engines; `None` if there are none. One whose step takes longer than `step_timeout` does not serve meanwhile.
    pub(crate) fn new(engines: Vec<Handle>, step_timeout: Duration) -> Option<Self> {
        let first = engines.first()?;
        Some(Self {
            limits: first.limits(),
            stop_ids: first.stop_ids().to_vec(),
            engines: engines.into_iter().map(RwLock::new).collect(),
            seen: Mutex::default(),
            step_timeout,
            draining: AtomicBool::new(false),
            replaced: Mutex::default(),
            failures: AtomicU64::new(0),
            moved: AtomicU64::new(0),
        })
    }

    /// The engine with an index.
    pub(crate) fn engine(&self, index: usize) -> Handle {
        self.engines[index].read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn handles(&self) -> impl Iterator<Item = Handle> + '_ {
        (0..self.engines.len()).map(|index| self.engine(index))
    }

    /// The number of engines, those included that have failed.
    pub(crate) fn count(&self) -> usize {
        self.engines.len()
    }

    /// Replaces an engine that has failed.
    pub(crate) fn replace(&self, index: usize, engine: Handle) {
        let mut place = self.engines[index].write().unwrap_or_else(PoisonError::into_inner);
        let counted = counts(&place);
        self.replaced.lock().unwrap_or_else(PoisonError::into_inner).add(&counted);
        *place = engine;
        if self.draining.load(Ordering::SeqCst) {
            place.drain();
        }
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).forget_engine(index);
    }

    /// Counts an engine as failed.
    pub(crate) fn count_failure(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of engines that have failed so far.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// The number of requests that have moved from a failed engine to another.
    pub(crate) fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// Submits a request to one of the engines.
    ///
    /// # Errors
    /// As [`Handle::submit`].
    pub(crate) fn submit(&self, request: Request) -> Result<MovingStream, ServiceError> {
        let again = (self.engines.len() > 1).then(|| request.clone());
        match (self.choose(&request.prompt).submit(request), again) {
            (Err(error), Some(again)) if has_failed(&error) => {
                Ok(MovingStream::new(self.take_over(again.clone())?, Some(again)))
            }
            (tokens, again) => Ok(MovingStream::new(tokens?, again)),
        }
    }

    /// Submits a request that a failed engine has not begun to another engine.
    fn take_over(&self, request: Request) -> Result<TokenStream, ServiceError> {
        let mut outcome = Err(ServiceError::Stopped);
        // Others may fail meanwhile.
        for _ in 0..self.engines.len() {
            outcome = self.choose(&request.prompt).take_over(request.clone());
            if !outcome.as_ref().is_err_and(has_failed) {
                self.moved.fetch_add(1, Ordering::Relaxed);
                break;
            }
        }
        outcome
    }

    /// Admits a request of several embeddings to every engine that has room.
    ///
    /// # Errors
    /// As [`Handle::admit`], if no engine has room.
    pub(crate) fn admit(&self) -> Result<Admissions, ServiceError> {
        let admitted: Vec<_> = self.handles().map(|engine| engine.admit()).collect();
        if admitted.iter().all(Result::is_err) {
            // There is at least one engine.
            return Err(admitted.into_iter().find_map(Result::err).unwrap_or(ServiceError::Stopped));
        }
        Ok(Admissions { engines: admitted.into_iter().map(Result::ok).collect() })
    }

    /// Chooses the engine for a prompt.
    fn choose(&self, prompt: &[u32]) -> Handle {
        self.engine(self.chosen(prompt))
    }

    fn chosen(&self, prompt: &[u32]) -> usize {
        if self.engines.len() == 1 {
            return 0;
        }
        let engines: Vec<Handle> = self.handles().collect();
        let mut open: Vec<bool> = engines.iter().map(|engine| self.serves(engine)).collect();
        if !open.contains(&true) {
            // A step that takes long may end, and an engine that drains says so.
            open = engines.iter().map(|engine| engine.phase() != ServicePhase::Stopped).collect();
        }
        let loads: Vec<Option<usize>> =
            engines.iter().zip(open).map(|(engine, open)| open.then(|| load(engine))).collect();
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).choose(prompt, &loads)
    }

    /// Whether an engine accepts requests and its steps end.
    fn serves(&self, engine: &Handle) -> bool {
        engine.phase() == ServicePhase::Running
            && engine.step_age().is_none_or(|age| age <= self.step_timeout)
    }

    /// The limits that a request has to keep to.
    pub(crate) fn limits(&self) -> RequestLimits {
        self.limits
    }

    /// The tokens that end an answer.
    pub(crate) fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The sum of the engines' statistics, those that were replaced included.
    pub(crate) fn statistics(&self) -> Statistics {
        let mut sum = self.replaced.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for engine in self.handles() {
            sum.add(&match engine.phase() {
                ServicePhase::Stopped => counts(&engine),
                _ => engine.statistics(),
            });
        }
        sum
    }

    /// The bytes of tokens that were generated and not read.
    pub(crate) fn unread_bytes(&self) -> usize {
        self.handles().map(|engine| engine.unread_bytes()).sum()
    }

    /// The state of each engine.
    pub(crate) fn health(&self) -> Vec<EngineHealth> {
        let health =
            |engine: Handle| EngineHealth { serving: self.serves(&engine), step_age: engine.step_age() };
        self.handles().map(health).collect()
    }

    /// Whether an engine accepts requests.
    pub(crate) fn is_running(&self) -> bool {
        self.handles().any(|engine| engine.phase() == ServicePhase::Running)
    }

    /// Whether all engines have ended.
    pub(crate) fn all_ended(&self) -> bool {
        self.handles().all(|engine| engine.phase() == ServicePhase::Stopped)
    }

    /// Refuses requests from here on; the engines finish those they have.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        self.handles().for_each(|engine| engine.drain());
    }

    /// Waits until all engines have finished their requests.
    pub(crate) async fn drained(&self) {
        let engines: Vec<Handle> = self.handles().collect();
        join_all(engines.iter().map(Handle::drained)).await;
    }
}

/// The admission of a request of several embeddings, by engine.
#[derive(Debug)]
pub(crate) struct Admissions {
    engines: Vec<Option<Admission>>,
}

impl Admissions {
    /// Computes one of the embeddings on one of the engines, and on another one if that fails before it begins.
    ///
    /// # Errors
    /// As [`Admission::embed`], and if the engine fails.
    pub(crate) async fn embed(
        &self,
        replicas: &Replicas,
        request: EmbeddingRequest,
    ) -> Result<Vec<f32>, ServiceError> {
        let mut moves = 0;
        loop {
            let outcome = self.submit(replicas, &request)?.await;
            match outcome {
                Err(ServiceError::NotBegun { .. }) if moves < self.engines.len() => moves += 1,
                outcome => return outcome,
            }
            replicas.moved.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn submit(
        &self,
        replicas: &Replicas,
        request: &EmbeddingRequest,
    ) -> Result<PendingEmbedding, ServiceError> {
        let chosen = self.engines.get(replicas.chosen(&request.tokens)).and_then(Option::as_ref);
        let mut outcome = Err(ServiceError::Stopped);
        for admission in chosen.into_iter().chain(self.engines.iter().flatten()) {
            outcome = admission.embed(request.clone());
            if !outcome.as_ref().is_err_and(has_failed) {
                break;
            }
        }
        outcome
    }
}

/// Whether a request was refused because its engine has failed, so that another may take it.
fn has_failed(error: &ServiceError) -> bool {
    matches!(error, ServiceError::Failed { .. } | ServiceError::NotBegun { .. })
}

/// The number of requests of an engine.
fn load(engine: &Handle) -> usize {
    let statistics = engine.statistics();
    statistics.running + statistics.waiting
}

/// What an engine that has ended had counted, without its state.
fn counts(engine: &Handle) -> Statistics {
    let statistics = engine.statistics();
    Statistics { waiting: 0, running: 0, pages_in_use: 0, pages_cached: 0, pages_total: 0, ..statistics }
}
