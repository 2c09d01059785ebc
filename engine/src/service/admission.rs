//! The admission of a request that consists of several embeddings.

use super::{Command, Handle, PendingEmbedding, ServiceError, ServicePhase};
use crate::request::EmbeddingRequest;
use std::sync::atomic::Ordering;

/// The right to submit embeddings to a service even when it accepts nothing else. A draining service does not end before it is
/// dropped.
#[derive(Debug)]
pub struct Admission {
    handle: Handle,
}

impl Admission {
    /// Makes an admission whose place in the queue is already reserved.
    pub(super) fn new(handle: Handle) -> Self {
        handle.shared.admissions.fetch_add(1, Ordering::SeqCst);
        Self { handle }
    }

    /// Submits an embedding request. Never blocks; dropping the result cancels the request.
    ///
    /// # Errors
    /// If the request cannot run at all, or the service has ended.
    pub fn embed(&self, request: EmbeddingRequest) -> Result<PendingEmbedding, ServiceError> {
        let handle = &self.handle;
        if handle.phase() == ServicePhase::Stopped {
            return Err(handle.shared.ended());
        }
        handle.limits.check_embedding(&request)?;
        handle.shared.waiting.fetch_add(1, Ordering::Relaxed);
        handle.deliver_embedding(handle.ids.next(), request)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.handle.shared.waiting.fetch_sub(1, Ordering::Relaxed);
        self.handle.shared.admissions.fetch_sub(1, Ordering::SeqCst);
        self.handle.send(Command::Released);
    }
}
