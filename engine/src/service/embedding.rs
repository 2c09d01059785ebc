//! A vector that is being made.

use super::{Command, Handle, ServiceError};
use crate::request::RequestId;
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::sync::oneshot;

/// Where the engine's thread puts a vector.
pub(super) type Sender = oneshot::Sender<Result<Vec<f32>, ServiceError>>;

/// A vector that is being made: a future, or something to block on. Dropping it before the vector has come cancels the request.
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

    /// Waits for the vector on a plain thread. Panics inside an async runtime's own threads, as all that blocks them does.
    ///
    /// # Errors
    /// If the request could not go on, the engine failed, or the service was stopped.
    pub fn blocking(mut self) -> Result<Vec<f32>, ServiceError> {
        self.ended = true;
        let (_, closed) = oneshot::channel();
        // Taken out, since what has a destructor cannot be taken apart.
        let vector = std::mem::replace(&mut self.vector, closed);
        vector.blocking_recv().unwrap_or_else(|_| Err(self.handle.shared.ended()))
    }
}

impl Future for PendingEmbedding {
    type Output = Result<Vec<f32>, ServiceError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let vector = ready!(Pin::new(&mut self.vector).poll(context));
        self.ended = true;
        // A channel that closes before means that the thread has ended.
        Poll::Ready(vector.unwrap_or_else(|_| Err(self.handle.shared.ended())))
    }
}

impl Drop for PendingEmbedding {
    fn drop(&mut self) {
        if !self.ended {
            self.handle.tell(Command::Cancel(self.id));
        }
    }
}
