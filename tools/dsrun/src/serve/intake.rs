//! Bounds on the work for requests that no engine has accepted yet: reading, parsing, templating and tokenising.
//!
//! A body is counted while it arrives, and until its request is prepared. A prepared request has a turn: few requests have one
//! at a time, because preparing takes CPU, and many times the memory of the body. Who leaves while waiting for a turn costs
//! nothing more; who leaves later is noticed at the next step of the work.

use super::error::ApiError;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::available_parallelism,
    time::Duration,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

/// The unit that bodies are counted in, in bytes.
const UNIT: usize = 1024;
/// The fewest bytes of bodies that are prepared at a time; one body of the largest size always fits. A body of many small values takes
/// some 50 times as much while it is prepared.
const LEAST_PREPARED_BYTES: usize = 4 << 20;
/// The most requests that are prepared at a time.
const MOST_TURNS: usize = 16;

/// The limits of reading a body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    /// The most bytes of a body.
    pub(crate) bytes: usize,
    /// The most bytes of all bodies together whose requests are not prepared yet.
    pub(crate) pending: usize,
    /// The longest time from the first byte to the last.
    pub(crate) time: Duration,
}

/// Counts the requests that are read and prepared.
#[derive(Debug)]
pub(crate) struct Intake {
    pub(crate) limits: BodyLimits,
    /// The longest time to wait for a turn.
    patience: Duration,
    pending: Arc<Semaphore>,
    pending_units: usize,
    turns: Arc<Semaphore>,
    prepared: Arc<Semaphore>,
    prepared_units: usize,
}

/// The bytes of a body, counted until this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    permit: OwnedSemaphorePermit,
    pending: Arc<Semaphore>,
    bytes: usize,
}

/// The turn of a request to be prepared, which lasts until this is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    _held: Held,
    _turn: OwnedSemaphorePermit,
    _prepared: OwnedSemaphorePermit,
}

fn units(bytes: usize) -> usize {
    bytes.div_ceil(UNIT).max(1)
}

impl Intake {
    pub(crate) fn new(limits: BodyLimits, patience: Duration) -> Self {
        let cores = available_parallelism().map_or(1, usize::from);
        let prepared_units = units(limits.bytes.max(LEAST_PREPARED_BYTES)).min(Semaphore::MAX_PERMITS);
        let pending_units = units(limits.pending).min(Semaphore::MAX_PERMITS);
        let semaphore = |permits: usize| Arc::new(Semaphore::new(permits));
        Self {
            limits,
            patience,
            pending: semaphore(pending_units),
            pending_units,
            turns: semaphore((cores / 2).clamp(1, MOST_TURNS)),
            prepared: semaphore(prepared_units),
            prepared_units,
        }
    }

    /// The bytes of bodies whose requests are not prepared yet, in whole units.
    pub(super) fn pending_bytes(&self) -> usize {
        (self.pending_units - self.pending.available_permits()) * UNIT
    }

    /// Starts to count a body.
    ///
    /// # Errors
    /// If the bodies that are counted have as many bytes as are allowed.
    pub(super) fn hold(&self) -> Result<Held, ApiError> {
        let permit = self.pending.clone().try_acquire_owned().map_err(|_| ApiError::too_much_pending())?;
        Ok(Held { permit, pending: self.pending.clone(), bytes: 0 })
    }

    /// Waits for the turn of a request with this body.
    ///
    /// # Errors
    /// If that takes longer than an answer may.
    pub(super) async fn turn(&self, held: Held) -> Result<Turn, ApiError> {
        let wait = async {
            let turn = self.turns.clone().acquire_owned().await;
            let most = units(held.bytes).min(self.prepared_units);
            let prepared = self.prepared.clone().acquire_many_owned(u32::try_from(most).unwrap_or(u32::MAX));
            Some((turn.ok()?, prepared.await.ok()?))
        };
        let permits = timeout(self.patience, wait).await.map_err(|_| ApiError::too_slow(self.patience))?;
        // The semaphores are never closed.
        let (turn, prepared) = permits.ok_or_else(ApiError::internal)?;
        Ok(Turn { _held: held, _turn: turn, _prepared: prepared })
    }
}

impl Held {
    /// Counts more bytes.
    ///
    /// # Errors
    /// As [`Intake::hold`].
    pub(super) fn add(&mut self, bytes: usize) -> Result<(), ApiError> {
        self.bytes += bytes;
        let more = units(self.bytes).saturating_sub(self.permit.num_permits());
        if more > 0 {
            let more = u32::try_from(more).map_err(|_| ApiError::too_much_pending())?;
            let more = self.pending.clone().try_acquire_many_owned(more);
            self.permit.merge(more.map_err(|_| ApiError::too_much_pending())?);
        }
        Ok(())
    }
}

/// Work for a request that runs on a thread of its own, and should stop when the client has left.
#[derive(Debug, Default)]
pub(crate) struct Work {
    abandoned: Arc<AtomicBool>,
}

/// Marks work as abandoned when it is dropped.
#[derive(Debug)]
pub(super) struct Client(Arc<AtomicBool>);

impl Drop for Client {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Work {
    /// The client that the work is for; dropping it abandons the work.
    pub(super) fn client(&self) -> Client {
        Client(self.abandoned.clone())
    }

    /// Ends abandoned work.
    ///
    /// # Errors
    /// If the client has left, who does not see the error.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        if self.abandoned.load(Ordering::Relaxed) {
            return Err(ApiError::not_ready("the client has left"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::StatusCode;

    fn intake(bytes: usize, pending: usize) -> Intake {
        let limits = BodyLimits { bytes, pending, time: Duration::from_secs(1) };
        Intake::new(limits, Duration::from_millis(10))
    }

    #[test]
    fn bodies_above_the_budget_are_refused_until_others_are_prepared() {
        let intake = intake(4096, 8192);
        let mut first = intake.hold().expect("there is room");
        first.add(4000).expect("there is room");
        let mut second = intake.hold().expect("there is room");
        second.add(4096).expect("there is room");
        let refused = second.add(1).expect_err("the budget is spent");
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(intake.hold().is_err());
        drop(first);
        second.add(1).expect("there is room again");
    }

    #[tokio::test]
    async fn requests_wait_for_their_turn_and_not_forever() {
        let intake = intake(4096, 1 << 20);
        let mut turns = Vec::new();
        let refused = loop {
            match intake.turn(intake.hold().expect("there is room")).await {
                Ok(turn) => turns.push(turn),
                Err(error) => break error,
            }
        };
        assert_eq!(refused.status(), StatusCode::GATEWAY_TIMEOUT);
        assert!((1..=MOST_TURNS).contains(&turns.len()));
        turns.pop();
        assert!(intake.turn(intake.hold().expect("there is room")).await.is_ok());
    }

    #[test]
    fn work_ends_when_its_client_leaves() {
        let work = Work::default();
        let client = work.client();
        assert!(work.check().is_ok());
        drop(client);
        assert!(work.check().is_err());
    }
}
