//! Several processes that run a model together, each with some of its ranks.
//!
//! All processes run the same command. Process 0 leads: it schedules and sends commands to the others. They connect through a
//! rendezvous address from their launcher ([`Launch`]), check that they are about to run the same thing, and stay connected. When
//! a process ends or hangs, the others notice it by the connection and end with an error that names it.

mod facts;
mod launch;

use crate::error::{EngineError, Result};
use dsrun_core::{
    Code, Error,
    collective::host::{HostTransport, tcp::TcpRank},
};
pub use facts::Facts;
pub(crate) use facts::facts;
pub use launch::{Launch, LaunchError, Launcher};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    net::IpAddr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// The time within which all processes have to connect.
const MEETING_TIMEOUT: Duration = Duration::from_secs(300);

/// How long processes wait for each other while they plan and load. A process that has ended is noticed much earlier.
const PEER_TIMEOUT: Duration = Duration::from_secs(3600);

/// After a wait for a rank of another process has failed: how long to wait for the error that caused it, and how often to check.
const CAUSE_TIMEOUT: Duration = Duration::from_secs(3);
const CAUSE_INTERVAL: Duration = Duration::from_millis(10);

/// The processes that run a model together, as one of them sees them.
#[derive(Debug)]
pub struct Processes {
    group: TcpRank,
}

impl Processes {
    /// Connects to the other processes, and waits until all have connected.
    ///
    /// # Errors
    /// If the address cannot be used, or a process does not connect within five minutes; the message names it.
    pub fn join(launch: &Launch) -> Result<Arc<Self>> {
        let Launch { meeting, process, processes, .. } = launch;
        Ok(Arc::new(Self {
            group: TcpRank::meet("process", meeting, *process, *processes, MEETING_TIMEOUT)?,
        }))
    }

    /// The number of this process.
    pub fn process(&self) -> usize {
        self.group.rank()
    }

    /// The number of processes.
    pub fn count(&self) -> usize {
        self.group.ranks()
    }

    /// Whether this process is process 0, which schedules and reads the results.
    pub fn leads(&self) -> bool {
        self.process() == 0
    }

    /// The address at which the others reach this process.
    pub(crate) fn address(&self) -> IpAddr {
        self.group.address()
    }

    /// Gathers a value from every process, in order of process number. `what` names the operation in error messages.
    ///
    /// # Errors
    /// If a process has ended.
    pub(crate) fn gather<T: Serialize + DeserializeOwned>(&self, what: &str, own: &T) -> Result<Vec<T>> {
        let own = encode(own)?;
        let all = self.group.gather_within(PEER_TIMEOUT, what, &own)?;
        all.iter().map(|bytes| decode(bytes)).collect()
    }

    /// Checks that every process has the same facts, such as its options, each under a name for people. The version of this crate is
    /// one of them.
    ///
    /// # Errors
    /// Names the process and the fact that differs, on every process.
    pub fn agree(&self, own: &Facts) -> Result<()> {
        let mut own = own.clone();
        own.insert("the version".into(), env!("CARGO_PKG_VERSION").into());
        let all = self.gather("comparing what the processes run", &own)?;
        match facts::difference(&all) {
            None => Ok(()),
            Some(difference) => Err(Error::new(Code::FailedPrecondition, difference).into()),
        }
    }

    /// Passes a result on. If it is an error, all other processes are aborted with it, since they may be waiting for this one.
    pub(crate) fn checked<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| {
            let error = self.cause(error);
            self.abort(&reason(&error));
            error
        })
    }

    /// The original error if another process has failed, otherwise `error`. A failed wait for a remote rank only names the rank's
    /// number within its group; the process connection, which notices the failure at about the same time, has the real cause.
    pub(crate) fn cause(&self, error: EngineError) -> EngineError {
        if !matches!(&error, EngineError::Hal(error) if error.code() == Code::Communication) {
            return error;
        }
        let end = Instant::now() + CAUSE_TIMEOUT;
        loop {
            match self.group.status() {
                Err(cause) => return cause.into(),
                Ok(()) if Instant::now() >= end => return error,
                Ok(()) => thread::sleep(CAUSE_INTERVAL),
            }
        }
    }

    /// Sends a message to another process.
    ///
    /// # Errors
    /// If the process has ended, or a process has failed.
    pub(crate) fn send<T: Serialize>(&self, process: usize, order: &T) -> Result<()> {
        Ok(self.group.send_message(&encode(order)?, process)?)
    }

    /// Waits for a message from another process, without a time limit as long as its heartbeats arrive.
    ///
    /// # Errors
    /// If the process has ended or sends no heartbeats, or a process has failed.
    pub(crate) fn receive<T: DeserializeOwned>(&self, process: usize) -> Result<T> {
        decode(&self.group.receive_message(Duration::MAX, process)?)
    }

    /// Makes every wait for another process fail at once with this reason, on all processes.
    pub fn abort(&self, reason: &str) {
        self.group.abort_group(reason);
    }

    /// Tells the other processes why this one ends, unless a process has failed already.
    pub fn leave(&self, reason: &str) {
        if self.group.status().is_ok() {
            self.abort(reason);
        }
    }
}

/// The message of an error without its code, to send to other processes.
pub(crate) fn reason(error: &EngineError) -> String {
    match error {
        EngineError::Hal(error) => error.message().to_owned(),
        error => error.to_string(),
    }
}

fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    let encoded = postcard::to_allocvec(value);
    encoded.map_err(|error| {
        EngineError::from(Error::internal(format!("a message to a process cannot be written: {error}")))
    })
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|error| {
        let message = format!("a process sent something that cannot be read: {error}");
        Error::new(Code::Communication, message).into()
    })
}
