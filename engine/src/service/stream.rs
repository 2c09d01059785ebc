//! The tokens of a request as they arrive.

use super::{Command, Handle, ServiceError, unread::Backlog};
use crate::request::{RequestId, TokenEvent};
use futures_core::Stream;
use std::{
    future::poll_fn,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
    time::Instant,
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// The engine thread's end of a token stream. The channel is bounded by the number of tokens that the request may generate, and
/// by the limit on unread tokens.
#[derive(Debug)]
pub(super) struct Sender {
    events: UnboundedSender<Result<TokenEvent, ServiceError>>,
    begun: Arc<OnceLock<Instant>>,
    backlog: Arc<Backlog>,
}

impl Sender {
    /// Sends a token. Returns false if the caller has left too many unread, which ends the stream with an error. A stream that was
    /// dropped has sent its cancellation.
    pub(super) fn send(&self, event: TokenEvent) -> bool {
        let fits = self.backlog.add(&event);
        if fits {
            let _ = self.events.send(Ok(event));
        } else {
            self.end(self.backlog.error());
        }
        fits
    }

    /// Sends the error that ends the stream.
    pub(super) fn end(&self, error: ServiceError) {
        let _ = self.events.send(Err(error));
    }

    /// Notes that the request begins in the step that began at `time`, unless it had begun before.
    pub(super) fn begin(&self, time: Instant) {
        let _ = self.begun.set(time);
    }

    /// Whether the request has begun.
    pub(super) fn has_begun(&self) -> bool {
        self.begun.get().is_some()
    }
}

/// The tokens of a request. The last one has a finish reason; after it, or after an error, the stream ends. Dropping the stream
/// before that cancels the request.
#[derive(Debug)]
pub struct TokenStream {
    id: RequestId,
    events: UnboundedReceiver<Result<TokenEvent, ServiceError>>,
    begun: Arc<OnceLock<Instant>>,
    backlog: Arc<Backlog>,
    handle: Handle,
    ended: bool,
}

impl TokenStream {
    /// A stream with the end that the engine thread sends to.
    pub(super) fn new(id: RequestId, handle: Handle) -> (Sender, Self) {
        let (sender, events) = unbounded_channel();
        let begun = Arc::default();
        let backlog = Arc::new(Backlog::new(handle.shared.unread.clone()));
        let sender = Sender { events: sender, begun: Arc::clone(&begun), backlog: backlog.clone() };
        (sender, Self { id, events, begun, backlog, handle, ended: false })
    }

    /// The request's id.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The time at which the first step with the request began; `None` while it waits.
    pub fn begun(&self) -> Option<Instant> {
        self.begun.get().copied()
    }

    /// The next token; `None` after the last.
    ///
    /// # Errors
    /// If the request could not continue, the engine failed, or the service was stopped.
    pub async fn next(&mut self) -> Option<Result<TokenEvent, ServiceError>> {
        poll_fn(|context| self.poll_event(context)).await
    }

    /// Waits for the next token on a plain thread; `None` after the last.
    ///
    /// # Panics
    /// On the threads of an async runtime, which must not block.
    ///
    /// # Errors
    /// Same as [`Self::next`].
    pub fn blocking_next(&mut self) -> Option<Result<TokenEvent, ServiceError>> {
        if self.ended {
            return None;
        }
        let event = self.events.blocking_recv();
        self.accept(event)
    }

    /// Polls for the next token.
    pub fn poll_event(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<TokenEvent, ServiceError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let event = ready!(self.events.poll_recv(context));
        Poll::Ready(self.accept(event))
    }

    /// Records whether an event is the last one.
    fn accept(
        &mut self,
        event: Option<Result<TokenEvent, ServiceError>>,
    ) -> Option<Result<TokenEvent, ServiceError>> {
        // A channel that closes before the last token means that the thread ended before it started the request.
        let event = event.unwrap_or_else(|| Err(self.handle.shared.never_started()));
        self.ended = match &event {
            Ok(event) => {
                self.backlog.remove(event);
                event.finish.is_some()
            }
            Err(_) => true,
        };
        Some(event)
    }
}

impl Stream for TokenStream {
    type Item = Result<TokenEvent, ServiceError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_event(context)
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        if !self.ended {
            self.handle.send(Command::Cancel(self.id));
        }
    }
}
