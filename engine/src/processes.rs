//! Several processes that run a model together, each with some of its ranks.
//!
//! All processes run the same command. Process 0 leads: it schedules, and tells the others what to do. They meet at an address that
//! their launcher gives them ([`Launch`]), compare what they are about to run, and then stay connected. A process that ends or stops
//! is noticed by its connections, and all others end with an error that names it.

mod facts;
mod launch;

use crate::error::{EngineError, Result};
use dsrun_core::{
    Code, Error,
    collective::host::{HostTransport, tcp::TcpRank},
};
pub(crate) use facts::{Facts, facts};
pub use launch::{Launch, LaunchError, Launcher};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    net::IpAddr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// The time in which all processes have to come.
const MEETING_TIMEOUT: Duration = Duration::from_secs(300);

/// The time that processes wait for each other while they plan and load. A process that has ended is noticed long before.
const PATIENCE: Duration = Duration::from_secs(3600);

/// The time in which a process learns why a wait for a rank of another has failed, and the time between looks for it.
const CAUSE_TIMEOUT: Duration = Duration::from_secs(3);
const CAUSE_INTERVAL: Duration = Duration::from_millis(10);

/// The processes that run a model together, as one of them sees them.
#[derive(Debug)]
pub struct Processes {
    group: TcpRank,
}

impl Processes {
    /// Joins the other processes, and waits until all have come.
    ///
    /// # Errors
    /// If the address cannot be used, or a process does not come within five minutes; the message names it.
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

    /// Whether this process schedules, and has the results.
    pub fn leads(&self) -> bool {
        self.process() == 0
    }

    /// The address at which the others reach this process.
    pub(crate) fn address(&self) -> IpAddr {
        self.group.address()
    }

    /// What every process says, in their order. `what` names it in messages.
    ///
    /// # Errors
    /// If a process has ended.
    pub(crate) fn gather<T: Serialize + DeserializeOwned>(&self, what: &str, own: &T) -> Result<Vec<T>> {
        let own = encode(own)?;
        let all = self.group.gather_within(PATIENCE, what, &own)?;
        all.iter().map(|bytes| decode(bytes)).collect()
    }

    /// Checks that every process has the same facts.
    ///
    /// # Errors
    /// Names the process and the fact that differs, on every process.
    pub(crate) fn agree(&self, own: &Facts) -> Result<()> {
        let all = self.gather("comparing what the processes run", own)?;
        match facts::difference(&all) {
            None => Ok(()),
            Some(difference) => Err(Error::new(Code::FailedPrecondition, difference).into()),
        }
    }

    /// Ends all other processes if this one has failed: they wait for it, and get its error.
    pub(crate) fn checked<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| {
            let error = self.cause(error);
            self.abort(&reason(&error));
            error
        })
    }

    /// The error of the process that has failed, if one has, in place of the error of a wait for one of its ranks. Members of a group
    /// of ranks have numbers of their own, and processes notice a failure about when the groups of their ranks do.
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

    /// Sends another process something to do.
    ///
    /// # Errors
    /// If the process has ended, or a process has failed.
    pub(crate) fn tell<T: Serialize>(&self, process: usize, order: &T) -> Result<()> {
        Ok(self.group.send_message(&encode(order)?, process)?)
    }

    /// Waits for what a process sends, however long it takes: the process is known to be alive.
    ///
    /// # Errors
    /// If the process has ended or sends nothing, not even signs of life, or a process has failed.
    pub(crate) fn hear<T: DeserializeOwned>(&self, process: usize) -> Result<T> {
        decode(&self.group.receive_message(Duration::MAX, process)?)
    }

    /// Makes every wait for a process fail at once, on every process.
    pub(crate) fn abort(&self, reason: &str) {
        self.group.abort_group(reason);
    }
}

/// The text of an error for other processes, which have the code of an error of their own.
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
