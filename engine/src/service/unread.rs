//! A bound on the memory of tokens that callers have not taken.
//!
//! The engine does not wait for a caller that takes its tokens slowly: other requests share its steps. So tokens pile up, and many slow
//! callers could fill the memory. The bytes of unread tokens are counted over all streams: beyond the limit no request is accepted, and
//! a stream ends once its own backlog is more than a few tokens.

use super::ServiceError;
use crate::request::TokenEvent;
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// The bytes of unread tokens that a stream may always have, so that a caller that takes its tokens is not affected by others.
const SLACK: usize = 16 << 10;

/// Counts the bytes of unread tokens of all streams of a service.
#[derive(Debug)]
pub(super) struct Unread {
    bytes: AtomicUsize,
    limit: usize,
}

impl Unread {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { bytes: AtomicUsize::new(0), limit })
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Checks that a further request may be accepted.
    ///
    /// # Errors
    /// If the unread tokens have more bytes than the limit.
    pub(super) fn check(&self) -> Result<(), ServiceError> {
        if self.bytes() > self.limit { Err(self.error()) } else { Ok(()) }
    }

    fn error(&self) -> ServiceError {
        ServiceError::Unread { limit: self.limit }
    }
}

/// Counts the bytes of unread tokens of one stream, until both of its ends are dropped.
#[derive(Debug)]
pub(super) struct Backlog {
    bytes: AtomicUsize,
    all: Arc<Unread>,
}

impl Backlog {
    pub(super) fn new(all: Arc<Unread>) -> Self {
        Self { bytes: AtomicUsize::new(0), all }
    }

    /// Counts a token. Returns false if it is too much.
    pub(super) fn add(&self, event: &TokenEvent) -> bool {
        let bytes = size(event);
        let own = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let all = self.all.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        own <= SLACK || all <= self.all.limit
    }

    /// Removes a token, which the caller has taken.
    pub(super) fn remove(&self, event: &TokenEvent) {
        let bytes = size(event);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.all.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn error(&self) -> ServiceError {
        self.all.error()
    }
}

impl Drop for Backlog {
    fn drop(&mut self) {
        self.all.bytes.fetch_sub(*self.bytes.get_mut(), Ordering::Relaxed);
    }
}

/// The bytes that a token takes in the channel.
fn size(event: &TokenEvent) -> usize {
    size_of::<Result<TokenEvent, ServiceError>>() + size_of_val(event.top.as_slice())
}
