//! The tokens of a request as they arrive.

use super::{Command, Handle, ServiceError};
use crate::request::{RequestId, TokenEvent};
use futures_core::Stream;
use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

/// The engine thread's end of a token stream. The channel holds no more tokens than the request may generate.
pub(super) type Sender = UnboundedSender<Result<TokenEvent, ServiceError>>;

/// The tokens of a request. The last one has a finish reason; after it, or after an error, the stream ends. Dropping the stream
/// before that cancels the request.
#[derive(Debug)]
pub struct TokenStream {
    id: RequestId,
    events: UnboundedReceiver<Result<TokenEvent, ServiceError>>,
    handle: Handle,
    ended: bool,
}

impl TokenStream {
    pub(super) fn new(
        id: RequestId,
        events: UnboundedReceiver<Result<TokenEvent, ServiceError>>,
        handle: Handle,
    ) -> Self {
        Self { id, events, handle, ended: false }
    }

    /// The request's id.
    pub fn id(&self) -> RequestId {
        self.id
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
            Ok(event) => event.finish.is_some(),
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
