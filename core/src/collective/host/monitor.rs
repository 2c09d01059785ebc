//! Shared state that ranks wait on, each wait with a limit and a name.

use crate::{Code, Error, Result};
use std::{
    ops::{Deref, DerefMut},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// A state whose changes end waits. Once it has failed, every wait fails.
#[derive(Debug)]
pub(super) struct Monitor<S> {
    state: Mutex<Fallible<S>>,
    changed: Condvar,
}

/// A state, or the error that it failed with.
#[derive(Debug)]
pub(super) struct Fallible<S> {
    failure: Option<Error>,
    state: S,
}

impl<S> Fallible<S> {
    /// The error that the state failed with.
    pub(super) fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }
}

impl<S> Deref for Fallible<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.state
    }
}

impl<S> DerefMut for Fallible<S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.state
    }
}

impl<S> Monitor<S> {
    pub(super) fn new(state: S) -> Self {
        Self { state: Mutex::new(Fallible { failure: None, state }), changed: Condvar::new() }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Fallible<S>> {
        // A rank that panicked while it held the lock has failed, and the timeouts of the others report it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the waiting threads, so that they check the changed state.
    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Waits until `ready` returns a value, the state fails, or the wait times out, which makes it fail.
    ///
    /// # Errors
    /// The failure of the state, that of `ready`, or [`Code::Timeout`], which names the waiting party and what is missing.
    pub(super) fn wait<'a, T>(
        &'a self,
        mut state: MutexGuard<'a, Fallible<S>>,
        timeout: Duration,
        what: &str,
        ready: impl Fn(&mut S) -> Result<Option<T>>,
        missing: impl Fn(&S) -> String,
    ) -> Result<(MutexGuard<'a, Fallible<S>>, T)> {
        // None if the deadline is beyond the range of the clock.
        let deadline = Instant::now().checked_add(timeout);
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            match ready(&mut state.state) {
                Ok(Some(value)) => return Ok((state, value)),
                Ok(None) => {}
                Err(error) => return Err(self.fail(state, error)),
            }
            let left =
                deadline.map_or(timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                let message = format!("{what} waited {timeout:?} for {}", missing(&state));
                return Err(self.fail(state, Error::new(Code::Timeout, message)));
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
        }
    }

    /// Same as [`Self::wait`], for a value that is moved out of the state.
    pub(super) fn take<T>(
        &self,
        timeout: Duration,
        what: &str,
        ready: impl Fn(&mut S) -> Result<Option<T>>,
        missing: impl Fn(&S) -> String,
    ) -> Result<T> {
        self.wait(self.lock(), timeout, what, ready, missing).map(|(_, value)| value)
    }

    /// Waits this long for the state to fail, and returns whether it has.
    pub(super) fn fails_within(&self, time: Duration) -> bool {
        let state = self.lock();
        let waited = self.changed.wait_timeout_while(state, time, |state| state.failure.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.failure.is_some()
    }

    /// Makes the state fail with this error, unless it has failed already. Returns the error.
    pub(super) fn fail(&self, mut state: MutexGuard<'_, Fallible<S>>, error: Error) -> Error {
        state.failure.get_or_insert_with(|| error.clone());
        self.changed.notify_all();
        error
    }
}
