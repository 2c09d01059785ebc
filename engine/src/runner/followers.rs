//! The other ranks of a model that is split over several devices.
//!
//! Rank 0 schedules, and sends every command to each follower, which uploads the same inputs and launches the same segments. A
//! follower is a thread with its own executor. It makes no decisions, so ranks cannot diverge; results are read from rank 0. All
//! ranks of the last stage sample the same tokens, because their logits, seeds and positions are equal. Ranks of earlier stages
//! sample nothing, and receive the tokens with the inputs of later steps.
//!
//! A follower that fails or panics aborts its groups: every collective ends at once with an error that names the rank.
//!
//! In every other process the first rank receives the commands of rank 0 and forwards them to the other ranks of that process.

use super::{executor::Executor, inputs::StepInputs};
use crate::{
    error::{EngineError, Result},
    plan::{Bucket, MeshRank, SegmentSet, StepState},
    processes::{Processes, reason},
};
use dsrun_core::{Code, Error};
use std::{
    any::Any,
    borrow::Cow,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// How long a follower waits for a command before it checks its communication groups for failures.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// A command that rank 0 sends to its followers.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) enum Command {
    /// Compile the step of a bucket if needed, and upload its inputs.
    Begin(Bucket, Box<StepInputs>),
    /// Launch segments of a step.
    Launch(Bucket, SegmentSet),
    /// Upload a row of a state.
    StateRow(StepState, usize, Vec<u8>),
    /// Zero a row of a state.
    ClearRow(StepState, usize, usize),
    /// Upload the mask of a step.
    Mask(Bucket, Vec<u32>),
    /// Upload bytes of the request table, from this offset on.
    Table(usize, Vec<u8>),
    /// Start or stop to record what is run.
    Trace(bool),
}

/// The followers of the first rank of this process, as that rank controls them.
#[derive(Debug)]
pub(super) struct Followers {
    ranks: Vec<Follower>,
    failure: Arc<Failure>,
    /// The other processes, if this is rank 0.
    workers: Option<Workers>,
}

/// What process 0 sends another: a command, or `None` when its engine ends.
type LeaderMessage<'a> = Option<Cow<'a, Command>>;

/// The other processes, as process 0 controls them.
#[derive(Debug)]
struct Workers {
    processes: Arc<Processes>,
    /// Threads that wait for each process to end.
    watchers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Follower {
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
}

/// The first failure of a follower, and the ranks of this process to abort when it happens.
#[derive(Debug)]
struct Failure {
    first: Mutex<Option<Error>>,
    ranks: Vec<MeshRank>,
}

impl Failure {
    fn set(&self, error: Error) {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    fn get(&self) -> Option<Error> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends every wait of the ranks of this process.
    fn abort(&self, reason: &str) {
        self.ranks.iter().for_each(|rank| rank.abort(reason));
    }
}

impl Followers {
    /// Starts a thread for each follower. `mesh` is the place of the rank that they follow.
    ///
    /// # Errors
    /// If a thread cannot be started, or a follower has no place in the mesh.
    pub(super) fn start(mesh: MeshRank, loaded: Vec<Executor>) -> Result<Self> {
        let place = |executor: &Executor| executor.plan().programs.mesh().cloned();
        let places: Option<Vec<MeshRank>> = loaded.iter().map(place).collect();
        let places = places.ok_or_else(|| Error::internal("a rank has no place in the mesh"))?;
        let ranks = std::iter::once(mesh).chain(places.iter().cloned()).collect();
        let failure = Arc::new(Failure { first: Mutex::default(), ranks });
        let mut followers = Self { ranks: Vec::new(), failure, workers: None };
        for (executor, place) in loaded.into_iter().zip(places) {
            let (sender, commands) = channel();
            let (failure, rank) = (followers.failure.clone(), place.rank());
            let work = move || follow(executor, &commands, &place, &failure);
            let thread = thread::Builder::new().name(format!("dsrun-rank-{rank}")).spawn(work);
            let thread = thread.map_err(|error| {
                Error::new(Code::Unavailable, format!("cannot start a thread for rank {rank}: {error}"))
            })?;
            followers.ranks.push(Follower { commands: Some(sender), thread: Some(thread) });
        }
        Ok(followers)
    }

    /// Makes the other processes follow as well.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub(super) fn add_processes(&mut self, processes: Arc<Processes>) -> Result<()> {
        let mut watchers = Vec::new();
        for process in 1..processes.count() {
            let (group, failure) = (processes.clone(), self.failure.clone());
            let work = move || watch(process, &group, &failure);
            let thread = thread::Builder::new().name(format!("dsrun-process-{process}")).spawn(work);
            watchers.push(thread.map_err(|error| {
                Error::new(Code::Unavailable, format!("cannot start a thread for process {process}: {error}"))
            })?);
        }
        self.workers = Some(Workers { processes, watchers });
        Ok(())
    }

    /// # Errors
    /// The error of the rank that failed first.
    pub(super) fn check(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Sends a command to every follower.
    ///
    /// # Errors
    /// If a follower has failed.
    pub(super) fn send(&self, command: &Command) -> Result<()> {
        for follower in &self.ranks {
            let commands = follower.commands.as_ref();
            if commands.is_none_or(|commands| commands.send(command.clone()).is_err()) {
                return Err(self.root_cause(Error::new(Code::Communication, "a rank has ended").into()));
            }
        }
        match &self.workers {
            Some(workers) => {
                workers.send(&Some(Cow::Borrowed(command))).map_err(|error| self.root_cause(error))
            }
            None => Ok(()),
        }
    }

    /// Ends every wait of the ranks of this process.
    pub(super) fn abort(&self, reason: &str) {
        self.failure.abort(reason);
    }

    /// Stops all ranks because the leading rank failed. Returns the error of the rank that failed first.
    pub(super) fn root_cause(&self, error: EngineError) -> EngineError {
        let error = match &self.workers {
            Some(workers) => workers.processes.cause(error),
            None => error,
        };
        let reason = reason(&error);
        self.failure.abort(&reason);
        if let Some(workers) = &self.workers {
            workers.processes.abort(&reason);
        }
        self.failure.get().map_or(error, EngineError::from)
    }
}

impl Drop for Followers {
    fn drop(&mut self) {
        let failed = thread::panicking() || self.failure.get().is_some();
        if failed {
            self.failure.abort("the engine has ended");
        }
        if let Some(workers) = self.workers.take() {
            workers.end(failed);
        }
        for follower in &mut self.ranks {
            follower.commands.take();
        }
        for thread in self.ranks.iter_mut().filter_map(|follower| follower.thread.take()) {
            // A follower catches its own panics and has reported them.
            drop(thread.join());
        }
    }
}

impl Workers {
    fn send(&self, order: &LeaderMessage<'_>) -> Result<()> {
        (1..self.processes.count()).try_for_each(|process| self.processes.send(process, order))
    }

    /// Tells the processes to end, and waits until they have ended.
    fn end(self, failed: bool) {
        if failed || self.send(&None).is_err() {
            self.processes.abort("the engine has ended");
        }
        for watcher in self.watchers {
            // The watcher has already recorded any failure.
            drop(watcher.join());
        }
    }
}

/// Waits for a process to end. If it ends without being told to, all ranks of this process fail with an error that names it.
fn watch(process: usize, processes: &Processes, failure: &Failure) {
    // A process that was told to end sends a message first; otherwise its connection just closes.
    if let Err(error) = processes.receive::<()>(process) {
        let error = match error {
            EngineError::Hal(error) => error,
            error => Error::new(Code::Communication, error.to_string()),
        };
        tracing::info!(process, %error, "a process has failed");
        failure.set(error.clone());
        failure.abort(error.message());
    }
}

/// Runs the commands of process 0 until its engine ends.
///
/// # Errors
/// If a rank of this process fails, which ends all others, or another process has.
pub(super) fn follow_leader(mut executor: Executor, processes: &Processes) -> Result<()> {
    let done = catch_unwind(AssertUnwindSafe(|| {
        while let Some(command) = processes.receive::<LeaderMessage<'_>>(0)? {
            executor.issue(command.into_owned())?;
        }
        executor.synchronize("the last step")?;
        processes.send(0, &())
    }));
    let done = done.unwrap_or_else(|panic| {
        Err(Error::new(Code::Panic, format!("it panicked: {}", panic_message(&*panic))).into())
    });
    if let Err(error) = &done {
        executor.abort(&reason(error));
    }
    processes.checked(done)
}

/// Runs commands until rank 0 closes the channel, or a command fails. Between commands it checks the groups of the rank: a
/// collective on the device can fail after its command has returned, while rank 0 waits for its result.
fn follow(mut executor: Executor, commands: &Receiver<Command>, mesh: &MeshRank, failure: &Failure) {
    loop {
        let done = match commands.recv_timeout(WATCH_INTERVAL) {
            Ok(command) => catch_unwind(AssertUnwindSafe(|| executor.issue(command))),
            Err(RecvTimeoutError::Timeout) => Ok(mesh.status().map_err(EngineError::from)),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let reason = match done {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => reason(&error),
            Err(panic) => format!("it panicked: {}", panic_message(&*panic)),
        };
        tracing::error!(rank = mesh.rank(), %reason, "a rank failed");
        // If the group is already aborted, another rank failed first and this failure is only a consequence.
        if mesh.status().is_ok() {
            failure.set(Error::new(Code::Communication, format!("rank {} failed: {reason}", mesh.rank())));
        }
        failure.abort(&reason);
        return;
    }
}

/// The message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
