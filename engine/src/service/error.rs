//! The errors of a service.

use crate::error::EngineError;
use std::{sync::Arc, time::Duration};

/// The reason why a service refused a request or did not finish it.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// The queue is full.
    #[error("busy: {waiting} requests wait, and the queue holds {limit}: try again later")]
    Busy {
        /// The number of waiting requests.
        waiting: usize,
        /// The limit on waiting requests.
        limit: usize,
    },

    /// Callers have not taken the tokens of their streams.
    #[error("more than {limit} bytes of tokens were generated and not read: read them, or try again later")]
    Unread {
        /// The limit on unread bytes.
        limit: usize,
    },

    /// The service accepts no more requests.
    #[error("the service finishes its requests and accepts no more")]
    Draining,

    /// The service was stopped.
    #[error("the service was stopped")]
    Stopped,

    /// The engine failed. The requests that had started are lost, and no more are accepted.
    #[error("the engine failed: {message}")]
    Failed {
        /// The error.
        message: Arc<str>,
    },

    /// The engine failed before this request started, so another engine can run it.
    #[error("the engine failed before the request started: {message}")]
    NotBegun {
        /// The error.
        message: Arc<str>,
    },

    /// The thread did not end in time.
    #[error("the engine's thread did not end within {timeout:?}: the device may hang")]
    Hangs {
        /// The time waited for it.
        timeout: Duration,
    },

    /// This request cannot run, or could not continue; other requests are not affected.
    #[error(transparent)]
    Request(Arc<EngineError>),
}

impl From<EngineError> for ServiceError {
    fn from(error: EngineError) -> Self {
        Self::Request(Arc::new(error))
    }
}
