//! An embedding that is being computed.

use super::{Command, Handle, ServiceError};
use crate::request::RequestId;
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::sync::oneshot;

/// The engine thread's end of a pending embedding.
pub(super) type Sender = oneshot::Sender<Result<Vec<f32>, ServiceError>>;

/// An embedding that is being computed: a future, or something to block on. Dropping it before it is ready cancels the request.
#[derive(Debug)]
pub struct PendingEmbedding {
    id: RequestId,
    vector: oneshot::Receiver<Result<Vec<f32>, ServiceError>>,
    handle: Handle,
    ended: bool,
}

impl PendingEmbedding {
    pub(super) fn new(
        id: RequestId,
        vector: oneshot::Receiver<Result<Vec<f32>, ServiceError>>,
        handle: Handle,
    ) -> Self {
        Self { id, vector, handle, ended: false }
    }

    /// Waits for the embedding on a plain thread.
    ///
    /// # Panics
    /// On the threads of an async runtime, which must not block.
    ///
    /// # Errors
    /// If the request could not continue, the engine failed, or the service was stopped.
    pub fn blocking(mut self) -> Result<Vec<f32>, ServiceError> {
        self.ended = true;
        let (_, closed) = oneshot::channel();
        // Replaced, because fields cannot be moved out of a type with a destructor.
        let vector = std::mem::replace(&mut self.vector, closed);
        vector.blocking_recv().unwrap_or_else(|_| Err(self.handle.shared.never_started()))
    }
}

impl Future for PendingEmbedding {
    type Output = Result<Vec<f32>, ServiceError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let vector = ready!(Pin::new(&mut self.vector).poll(context));
        self.ended = true;
        // A channel that closes without an embedding means that the thread ended before it started the request.
        Poll::Ready(vector.unwrap_or_else(|_| Err(self.handle.shared.never_started())))
    }
}

impl Drop for PendingEmbedding {
    fn drop(&mut self) {
        if !self.ended {
            self.handle.send(Command::Cancel(self.id));
        }
    }
}
