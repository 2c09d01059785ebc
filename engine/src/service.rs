//! Runs an engine on its own thread and serves many callers at once.
//!
//! A [`Service`] owns the thread, and callers clone its [`Handle`]. A request becomes a [`TokenStream`], which any async runtime can
//! poll and a plain thread can block on. Dropping the stream cancels the request. When the engine fails, or its thread panics,
//! every stream ends with an error, so that no caller waits forever.

mod admission;
mod embedding;
mod engine_thread;
mod error;
mod stream;
mod unread;

use crate::{
    engine::Engine,
    request::{EmbeddingRequest, Request, RequestId, RequestIds, RequestLimits},
    statistics::Statistics,
};
pub use admission::Admission;
pub use embedding::PendingEmbedding;
use engine_thread::EngineThread;
pub use error::ServiceError;
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};
pub use stream::TokenStream;
use tokio::sync::{oneshot, watch};
use unread::Unread;

/// How long dropping a service waits for its thread to end.
const DROP_TIMEOUT: Duration = Duration::from_secs(10);

/// The options of a service.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct ServiceOptions {
    /// The maximum number of requests that may wait to start; more are refused with [`ServiceError::Busy`].
    pub queue: usize,
    /// The maximum bytes of tokens that callers have not taken. Beyond it requests are refused, and streams end whose callers are
    /// behind, with [`ServiceError::Unread`].
    pub unread: usize,
}

impl Default for ServiceOptions {
    fn default() -> Self {
        Self { queue: 1024, unread: 64 << 20 }
    }
}

/// The lifecycle phase of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServicePhase {
    /// It accepts requests.
    Running,
    /// It accepts no more requests, and finishes those it has.
    Draining,
    /// It has finished all requests, and accepts no more.
    Drained,
    /// Its thread has ended: it was stopped, or the engine failed.
    Stopped,
}

/// A command to the engine's thread.
enum Command {
    Submit(RequestId, Box<Request>, stream::Sender),
    Embed(RequestId, EmbeddingRequest, embedding::Sender),
    Cancel(RequestId),
    /// An admission was dropped, so a draining engine may be done.
    Released,
    Drain,
    Stop,
}

/// State that the thread and the handles share.
#[derive(Debug)]
struct Shared {
    /// Requests that were submitted and have not started.
    waiting: AtomicUsize,
    /// The number of admissions that still exist.
    admissions: AtomicUsize,
    unread: Arc<Unread>,
    statistics: Mutex<Statistics>,
    phase: watch::Sender<ServicePhase>,
    /// The time at which the present step began; `None` between steps.
    step_start: Mutex<Option<Instant>>,
    /// The reason why the thread ended; `None` while it runs.
    ended: Mutex<Option<ServiceError>>,
}

impl Shared {
    /// The reason why the thread ended, as the error of a stream.
    fn ended(&self) -> ServiceError {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.clone().unwrap_or(ServiceError::Stopped)
    }

    /// The error of a request whose channel closed without a message, which means that it never ran.
    fn never_started(&self) -> ServiceError {
        match self.ended() {
            ServiceError::Failed { message } => ServiceError::NotBegun { message },
            reason => reason,
        }
    }

    /// Records when the current step began, or that it has ended.
    fn set_step_start(&self, start: Option<Instant>) {
        *self.step_start.lock().unwrap_or_else(PoisonError::into_inner) = start;
    }

    /// Sets the reason why the thread ends, unless it is already set.
    fn end(&self, reason: ServiceError) {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(reason);
    }

    /// Advances to a later phase.
    fn advance(&self, to: ServicePhase) {
        self.phase.send_if_modified(|phase| {
            let later = (*phase as u8) < to as u8;
            if later {
                *phase = to;
            }
            later
        });
    }
}

/// Owns the thread that runs an engine.
#[derive(Debug)]
pub struct Service {
    handle: Handle,
    /// Disconnects when the thread has dropped everything; `None` after that was waited for.
    done: Option<mpsc::Receiver<()>>,
}

impl Service {
    /// Starts a thread named `engine` that runs an engine.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn start(engine: Engine, options: &ServiceOptions) -> Result<Self, ServiceError> {
        let (commands, inbox) = mpsc::channel();
        let (done_sender, done) = mpsc::channel();
        let shared = Arc::new(Shared {
            waiting: AtomicUsize::new(0),
            admissions: AtomicUsize::new(0),
            unread: Unread::new(options.unread),
            statistics: Mutex::new(engine.statistics().clone()),
            phase: watch::Sender::new(ServicePhase::Running),
            step_start: Mutex::new(None),
            ended: Mutex::new(None),
        });
        let handle = Handle {
            commands,
            ids: engine.ids().clone(),
            limits: engine.limits(),
            stop_ids: engine.stop_ids().into(),
            queue: options.queue,
            shared: shared.clone(),
        };
        let run = move || {
            // Dropped last, also during a panic, which signals that the thread has ended.
            let _done = done_sender;
            EngineThread::new(engine, inbox, shared).run();
        };
        thread::Builder::new().name("engine".into()).spawn(run).map_err(|error| ServiceError::Failed {
            message: format!("cannot start its thread: {error}").into(),
        })?;
        Ok(Self { handle, done: Some(done) })
    }

    /// A handle for callers.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Cancels the running requests and ends the thread: streams end with [`ServiceError::Stopped`]. To let requests finish, call
    /// [`Handle::drain`] and wait for [`Handle::drained`] first.
    ///
    /// # Errors
    /// If the thread does not end in time: the device may hang. The thread and its memory then leak.
    pub fn stop(mut self, timeout: Duration) -> Result<(), ServiceError> {
        self.end(timeout)
    }

    fn end(&mut self, timeout: Duration) -> Result<(), ServiceError> {
        let Some(done) = self.done.take() else { return Ok(()) };
        self.handle.send(Command::Stop);
        match done.recv_timeout(timeout) {
            Err(mpsc::RecvTimeoutError::Timeout) => Err(ServiceError::Hangs { timeout }),
            _ => Ok(()),
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if let Err(error) = self.end(DROP_TIMEOUT) {
            tracing::error!(%error, "the engine's thread does not end and leaks its memory");
        }
    }
}

/// A caller's handle of a [`Service`]. Clones refer to the same service.
#[derive(Clone, Debug)]
pub struct Handle {
    commands: mpsc::Sender<Command>,
    ids: RequestIds,
    limits: RequestLimits,
    stop_ids: Arc<[u32]>,
    queue: usize,
    shared: Arc<Shared>,
}

impl Handle {
    /// Submits a request. Its tokens arrive in the stream; dropping the stream cancels it. Never blocks.
    ///
    /// # Errors
    /// [`ServiceError::Request`] if the request cannot run at all, [`ServiceError::Busy`] if too many requests wait,
    /// [`ServiceError::Unread`] if too many tokens were not taken, [`ServiceError::Draining`], or the reason why the service has
    /// ended.
    pub fn submit(&self, request: Request) -> Result<TokenStream, ServiceError> {
        let id = self.enqueue(self.limits.check(&request))?;
        self.deliver_request(id, request)
    }

    fn deliver_request(&self, id: RequestId, request: Request) -> Result<TokenStream, ServiceError> {
        let (sender, stream) = TokenStream::new(id, self.clone());
        self.deliver(Command::Submit(id, Box::new(request), sender))?;
        Ok(stream)
    }

    /// Submits a request that another service had accepted but [never started](ServiceError::NotBegun). It is accepted even if
    /// the queue is full or the service drains.
    ///
    /// # Errors
    /// [`ServiceError::Request`] if the request cannot run at all, or the reason why the service has ended.
    pub fn take_over(&self, request: Request) -> Result<TokenStream, ServiceError> {
        if self.phase() == ServicePhase::Stopped {
            return Err(self.shared.ended());
        }
        self.limits.check(&request)?;
        self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        self.deliver_request(self.ids.next(), request)
    }

    /// Submits an embedding request. Never blocks; dropping the result cancels the request.
    ///
    /// # Errors
    /// Same as [`Self::submit`].
    pub fn embed(&self, request: EmbeddingRequest) -> Result<PendingEmbedding, ServiceError> {
        let id = self.enqueue(self.limits.check_embedding(&request))?;
        self.deliver_embedding(id, request)
    }

    /// Admits a request that consists of several embeddings: they can be submitted from here on, one after the other, although the
    /// queue fills or the service starts to drain. The admission takes one place in the queue until it is dropped.
    ///
    /// # Errors
    /// Same as [`Self::submit`].
    pub fn admit(&self) -> Result<Admission, ServiceError> {
        self.enqueue(Ok(()))?;
        Ok(Admission::new(self.clone()))
    }

    fn deliver_embedding(
        &self,
        id: RequestId,
        request: EmbeddingRequest,
    ) -> Result<PendingEmbedding, ServiceError> {
        let (sender, receiver) = oneshot::channel();
        let pending = PendingEmbedding::new(id, receiver, self.clone());
        self.deliver(Command::Embed(id, request, sender))?;
        Ok(pending)
    }

    /// Reserves a place in the queue and an id for a request, if its check succeeded.
    fn enqueue(&self, checked: crate::error::Result<()>) -> Result<RequestId, ServiceError> {
        match self.phase() {
            ServicePhase::Running => {}
            ServicePhase::Draining | ServicePhase::Drained => return Err(ServiceError::Draining),
            ServicePhase::Stopped => return Err(self.shared.ended()),
        }
        checked?;
        self.shared.unread.check()?;
        let room = |waiting: usize| (waiting < self.queue).then_some(waiting + 1);
        self.shared
            .waiting
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, room)
            .map_err(|waiting| ServiceError::Busy { waiting, limit: self.queue })?;
        Ok(self.ids.next())
    }

    fn deliver(&self, command: Command) -> Result<(), ServiceError> {
        self.commands.send(command).map_err(|_| self.shared.ended())
    }

    /// The limits that a request has to keep to.
    pub fn limits(&self) -> RequestLimits {
        self.limits
    }

    /// The model's tokens that end an answer.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The engine's statistics as of its last step.
    pub fn statistics(&self) -> Statistics {
        let mut statistics = self.shared.statistics.lock().unwrap_or_else(PoisonError::into_inner).clone();
        statistics.waiting = self.shared.waiting.load(Ordering::Relaxed);
        statistics
    }

    /// The bytes of tokens that callers have not taken.
    pub fn unread_bytes(&self) -> usize {
        self.shared.unread.bytes()
    }

    /// The time since the present step began; `None` between steps. A step that takes far longer than others shows that the device
    /// hangs.
    pub fn step_age(&self) -> Option<Duration> {
        let start = *self.shared.step_start.lock().unwrap_or_else(PoisonError::into_inner);
        start.map(|start| start.elapsed())
    }

    /// The phase of the service.
    pub fn phase(&self) -> ServicePhase {
        *self.shared.phase.borrow()
    }

    /// The error of the engine, if it failed.
    pub fn failure(&self) -> Option<ServiceError> {
        let ended = self.shared.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.clone().filter(|error| matches!(error, ServiceError::Failed { .. }))
    }

    /// Refuses requests from here on. Those that wait or run are finished.
    pub fn drain(&self) {
        self.shared.advance(ServicePhase::Draining);
        self.send(Command::Drain);
    }

    /// Waits until all requests are finished after [`Self::drain`], or the service has ended.
    pub async fn drained(&self) {
        self.reached(ServicePhase::Drained).await;
    }

    /// Waits until the service has ended: it was stopped, or the engine failed.
    pub async fn stopped(&self) {
        self.reached(ServicePhase::Stopped).await;
    }

    async fn reached(&self, wanted: ServicePhase) {
        let mut phase = self.shared.phase.subscribe();
        // `self` holds the sender, so the channel stays open while this waits.
        let _ = phase.wait_for(|phase| *phase as u8 >= wanted as u8).await;
    }

    /// Sends a command that needs no answer. It is lost if the thread has ended, where it would have no effect.
    fn send(&self, command: Command) {
        let _ = self.commands.send(command);
    }
}
