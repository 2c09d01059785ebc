//! The thread that runs the engine: takes commands between steps, and hands out tokens.

use super::{Command, ServiceError, ServicePhase, Shared, embedding, stream::Sender};
use crate::{Engine, error::Result, request::RequestId};
use std::{
    any::Any,
    collections::HashMap,
    ops::ControlFlow,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, PoisonError, atomic::Ordering, mpsc::Receiver},
};

/// What the thread works with.
pub(super) struct EngineThread {
    engine: Engine,
    inbox: Receiver<Command>,
    shared: Arc<Shared>,
    streams: HashMap<RequestId, Sender>,
    embeddings: HashMap<RequestId, embedding::Sender>,
    /// Requests that the engine lets wait, as told to the handles.
    waiting: usize,
    draining: bool,
}

impl EngineThread {
    pub(super) fn new(engine: Engine, inbox: Receiver<Command>, shared: Arc<Shared>) -> Self {
        let (streams, embeddings) = (HashMap::new(), HashMap::new());
        Self { engine, inbox, shared, streams, embeddings, waiting: 0, draining: false }
    }

    /// Runs until it is told to stop, all handles are gone, or the engine fails.
    pub(super) fn run(mut self) {
        // After a panic nothing of the engine is used again but to drop it.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.serve()));
        let reason = match outcome {
            Ok(Ok(())) => ServiceError::Stopped,
            Ok(Err(error)) => ServiceError::Failed { message: error.to_string().into() },
            Err(panic) => ServiceError::Failed { message: format!("it panicked: {}", said(&*panic)).into() },
        };
        if matches!(reason, ServiceError::Failed { .. }) {
            tracing::error!(error = %reason, "the engine's thread ends");
        }
        // In this order: a stream whose sender is gone asks why.
        self.shared.end(reason);
        self.shared.advance(ServicePhase::Stopped);
        self.streams.clear();
        self.embeddings.clear();
    }

    fn serve(&mut self) -> Result<()> {
        loop {
            if self.take_commands().is_break() {
                return Ok(());
            }
            let events = if self.engine.is_idle() { Vec::new() } else { self.engine.step()? };
            let failures = self.engine.take_failures();
            let vectors = self.engine.take_embeddings();
            // First the figures: who has seen a token sees figures that count it.
            self.publish();
            for event in events {
                let (id, finished) = (event.request, event.finish.is_some());
                let Some(sender) = self.streams.get(&id) else { continue };
                // A stream that is gone has sent its cancellation.
                let _ = sender.send(Ok(event));
                if finished {
                    self.streams.remove(&id);
                }
            }
            for (id, vector) in vectors {
                let _ = self.embeddings.remove(&id).map(|sender| sender.send(Ok(vector)));
            }
            for (id, error) in failures {
                match self.embeddings.remove(&id) {
                    Some(sender) => drop(sender.send(Err(error.into()))),
                    None => drop(self.streams.remove(&id).map(|sender| sender.send(Err(error.into())))),
                }
            }
        }
    }

    /// Takes what has come in; waits for something if the engine has nothing to do.
    fn take_commands(&mut self) -> ControlFlow<()> {
        if self.engine.is_idle() {
            if self.draining {
                self.shared.advance(ServicePhase::Drained);
            }
            match self.inbox.recv() {
                Ok(command) => self.take(command)?,
                Err(_) => return ControlFlow::Break(()),
            }
        }
        while let Ok(command) = self.inbox.try_recv() {
            self.take(command)?;
        }
        ControlFlow::Continue(())
    }

    fn take(&mut self, command: Command) -> ControlFlow<()> {
        match command {
            Command::Submit(id, request, sender) => {
                self.waiting += 1;
                match self.engine.submit_as(id, *request) {
                    Ok(()) => drop(self.streams.insert(id, sender)),
                    Err(error) => drop(sender.send(Err(error.into()))),
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
            Command::Drain => self.draining = true,
            Command::Stop => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    /// Lets the handles see the engine's figures.
    fn publish(&mut self) {
        let statistics = self.engine.statistics();
        // `self.waiting` counts those taken since; what the engine let wait before and does no more has left the queue.
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

/// What a panic said.
fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
