//! The engine thread: executes commands between steps and sends sampled tokens to the streams of their requests.

use super::{Command, ServiceError, ServicePhase, Shared, embedding, stream::Sender};
use crate::{engine::Engine, error::Result, request::RequestId};
use std::{
    any::Any,
    collections::HashMap,
    ops::ControlFlow,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, PoisonError,
        atomic::Ordering,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

/// The interval at which an idle engine checks whether the other ranks still run.
const RANKS_INTERVAL: Duration = Duration::from_secs(1);

/// The state of the engine thread.
pub(super) struct EngineThread {
    engine: Engine,
    inbox: Receiver<Command>,
    shared: Arc<Shared>,
    streams: HashMap<RequestId, Sender>,
    embeddings: HashMap<RequestId, embedding::Sender>,
    /// The number of waiting requests that was last published to the handles.
    waiting: usize,
    /// Prompt tokens of the requests that have begun.
    started_tokens: u64,
    draining: bool,
}

impl EngineThread {
    pub(super) fn new(engine: Engine, inbox: Receiver<Command>, shared: Arc<Shared>) -> Self {
        let (streams, embeddings) = (HashMap::new(), HashMap::new());
        Self { engine, inbox, shared, streams, embeddings, waiting: 0, started_tokens: 0, draining: false }
    }

    /// Runs until a command stops it, all handles are dropped, or the engine fails.
    pub(super) fn run(mut self) {
        // After a panic the engine is not used again, only dropped, so a broken invariant is harmless.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.serve()));
        let reason = match outcome {
            Ok(Ok(())) => ServiceError::Stopped,
            Ok(Err(error)) => ServiceError::Failed { message: error.to_string().into() },
            Err(panic) => {
                let message = format!("it panicked: {}", panic_message(&*panic));
                // The other ranks wait for this one, and dropping the engine waits for them.
                self.engine.abandon(&message);
                ServiceError::Failed { message: message.into() }
            }
        };
        if matches!(reason, ServiceError::Failed { .. }) {
            tracing::error!(error = %reason, "the engine thread ends");
        }
        // The reason is stored first: a stream whose sender is dropped reads it.
        self.shared.end(reason.clone());
        self.shared.set_step_start(None);
        self.shared.advance(ServicePhase::Stopped);
        if matches!(reason, ServiceError::Failed { .. }) {
            self.fail_started_requests(&reason);
        }
        self.streams.clear();
        self.embeddings.clear();
    }

    /// Sends the reason to every request that has been in a step: it may have caused the failure, so it is not retried. The
    /// channels of all other requests, those in the inbox included, close without a message, and the caller may submit them to
    /// another engine.
    fn fail_started_requests(&mut self, reason: &ServiceError) {
        let engine = &self.engine;
        // After a panic this query may panic too. The request then counts as started.
        let started =
            |id: &RequestId| catch_unwind(AssertUnwindSafe(|| engine.has_started(*id))).unwrap_or(true);
        for (_, sender) in self.streams.drain().filter(|(id, _)| started(id)) {
            sender.end(reason.clone());
        }
        for (_, sender) in self.embeddings.drain().filter(|(id, _)| started(id)) {
            let _ = sender.send(Err(reason.clone()));
        }
    }

    fn serve(&mut self) -> Result<()> {
        loop {
            if self.take_commands()?.is_break() {
                return Ok(());
            }
            let step_start = Instant::now();
            let events = if self.engine.is_idle() {
                Vec::new()
            } else {
                self.shared.set_step_start(Some(step_start));
                self.engine.step()?
            };
            self.shared.set_step_start(None);
            self.note_begun(step_start);
            let failures = self.engine.take_failures();
            let vectors = self.engine.take_embeddings();
            // Statistics are published before tokens are sent, so that they already count a token when its caller receives it.
            self.publish();
            let mut behind = false;
            for event in events {
                let (id, finished) = (event.request, event.finish.is_some());
                let Some(sender) = self.streams.get(&id) else { continue };
                // It may have begun and ended in one step. If the stream was dropped, its cancellation is already in the inbox.
                sender.begin(step_start);
                let fits = sender.send(event);
                if finished || !fits {
                    self.streams.remove(&id);
                }
                if !finished && !fits {
                    self.engine.cancel(id);
                    behind = true;
                }
            }
            if behind {
                self.publish();
            }
            for (id, vector) in vectors {
                let _ = self.embeddings.remove(&id).map(|sender| sender.send(Ok(vector)));
            }
            for (id, error) in failures {
                match self.embeddings.remove(&id) {
                    Some(sender) => drop(sender.send(Err(error.into()))),
                    None => {
                        if let Some(sender) = self.streams.remove(&id) {
                            sender.end(error.into());
                        }
                    }
                }
            }
        }
    }

    /// Notes which requests have begun in the step that began at `step_start`.
    fn note_begun(&mut self, step_start: Instant) {
        // The count grows with every request that begins, since no prompt is empty.
        let started = self.engine.statistics().prompt_tokens;
        if std::mem::replace(&mut self.started_tokens, started) == started {
            return;
        }
        for (id, sender) in self.streams.iter().filter(|(_, sender)| !sender.has_begun()) {
            if self.engine.has_started(*id) {
                sender.begin(step_start);
            }
        }
    }

    /// Executes the commands that have arrived; waits for one if the engine is idle.
    ///
    /// # Errors
    /// If a rank of an idle engine has failed.
    fn take_commands(&mut self) -> Result<ControlFlow<()>> {
        if self.engine.is_idle() {
            if self.draining && self.shared.admissions.load(Ordering::SeqCst) == 0 {
                self.shared.advance(ServicePhase::Drained);
            }
            let Some(command) = self.next_command()? else { return Ok(ControlFlow::Break(())) };
            if self.execute(command).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        while let Ok(command) = self.inbox.try_recv() {
            if self.execute(command).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Waits for a command; returns `None` if all handles are dropped. With several ranks, it checks periodically that none has
    /// failed.
    fn next_command(&mut self) -> Result<Option<Command>> {
        if self.engine.ranks() == 1 {
            return Ok(self.inbox.recv().ok());
        }
        loop {
            match self.inbox.recv_timeout(RANKS_INTERVAL) {
                Ok(command) => return Ok(Some(command)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => self.engine.check_ranks()?,
            }
        }
    }

    fn execute(&mut self, command: Command) -> ControlFlow<()> {
        match command {
            Command::Submit(id, request, sender) => {
                self.waiting += 1;
                match self.engine.submit_as(id, *request) {
                    Ok(()) => drop(self.streams.insert(id, sender)),
                    Err(error) => sender.end(error.into()),
                }
            }
            Command::Embed(id, request, sender) => {
                self.waiting += 1;
                match self.engine.submit_embedding_as(id, request) {
                    Ok(()) => drop(self.embeddings.insert(id, sender)),
                    Err(error) => drop(sender.send(Err(error.into()))),
                }
            }
            Command::Cancel(id) => {
                self.engine.cancel(id);
                self.streams.remove(&id);
                self.embeddings.remove(&id);
            }
            Command::Released => {}
            Command::Drain => self.draining = true,
            Command::Stop => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    /// Publishes the engine's statistics to the handles.
    fn publish(&mut self) {
        let statistics = self.engine.statistics();
        // `self.waiting` also counts the requests received since the last call; requests that the engine has started no longer
        // wait.
        let now = statistics.waiting;
        if now < self.waiting {
            self.shared.waiting.fetch_sub(self.waiting - now, Ordering::Relaxed);
        } else {
            self.shared.waiting.fetch_add(now - self.waiting, Ordering::Relaxed);
        }
        self.waiting = now;
        self.shared.statistics.lock().unwrap_or_else(PoisonError::into_inner).clone_from(statistics);
    }
}

/// The message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
