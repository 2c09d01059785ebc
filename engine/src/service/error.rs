//! The errors of the service.

use crate::error::EngineError;
use std::{sync::Arc, time::Duration};

/// Why a service did not take a request, or did not finish it.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// The queue is full.
    #[error("busy: {waiting} requests wait, and the queue holds {limit}: try again later")]
    Busy {
        /// Requests that wait.
        waiting: usize,
        /// How many may.
        limit: usize,
    },

    /// It takes no more requests.
    #[error("the service finishes what it has and takes no more requests")]
    Draining,

    /// It was stopped.
    #[error("the service was stopped")]
    Stopped,

    /// The engine failed; all requests are lost, and none is taken any more.
    #[error("the engine failed: {message}")]
    Failed {
        /// What happened.
        message: Arc<str>,
    },

    /// The thread did not end.
    #[error("the engine's thread did not end within {timeout:?}: the device may hang")]
    Hangs {
        /// How long it was waited for.
        timeout: Duration,
    },

    /// This request cannot run, or could not go on; the others are not concerned.
    #[error(transparent)]
    Request(Arc<EngineError>),
}

impl From<EngineError> for ServiceError {
    fn from(error: EngineError) -> Self {
        Self::Request(Arc::new(error))
    }
}
