//! The other ranks of a model that is split over several devices.
//!
//! Rank 0 schedules, and has each follower do on its device what it does on its own: upload the same inputs, launch the same
//! segments. A follower is a thread with an executor of its own. It decides nothing, so ranks cannot disagree; results are read
//! from rank 0. It samples the tokens that every rank of its stage samples, because their logits, seeds and positions are equal;
//! ranks of earlier stages sample none, and get the tokens with the inputs of later steps.
//!
//! A follower that fails or panics aborts its groups: every collective ends at once with an error that names the rank.
//!
//! In each other process the first rank hears the commands of rank 0, and has the ranks beside it do what it does.

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

/// How long a follower waits for a command before it looks at its groups.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// What rank 0 has a follower do.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) enum Command {
    /// Compile the step of a bucket if need be, and upload its inputs.
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
}

/// The ranks that follow one of this process, which is rank 0 or follows it.
#[derive(Debug)]
pub(super) struct Followers {
    ranks: Vec<Follower>,
    failure: Arc<Failure>,
    /// The other processes, if this is rank 0.
    workers: Option<Workers>,
}

/// What process 0 sends another: a command, or `None` when its engine ends.
type Order<'a> = Option<Cow<'a, Command>>;

/// The other processes, as process 0 has them.
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

/// The first failure of a follower, and the ranks of this process, whose waits it ends.
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
    /// That of the rank that failed first.
    pub(super) fn check(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Has every follower run a command.
    ///
    /// # Errors
    /// If a follower has failed.
    pub(super) fn send(&self, command: &Command) -> Result<()> {
        for follower in &self.ranks {
            let commands = follower.commands.as_ref();
            if commands.is_none_or(|commands| commands.send(command.clone()).is_err()) {
                return Err(self.explained(Error::new(Code::Communication, "a rank has ended").into()));
            }
        }
        match &self.workers {
            Some(workers) => {
                workers.tell(&Some(Cow::Borrowed(command))).map_err(|error| self.explained(error))
            }
            None => Ok(()),
        }
    }

    /// Ends every wait of the ranks of this process.
    pub(super) fn abort(&self, reason: &str) {
        self.failure.abort(reason);
    }

    /// Ends all ranks because the one that is followed failed. Returns the error of the rank that failed first.
    pub(super) fn explained(&self, error: EngineError) -> EngineError {
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
    fn tell(&self, order: &Order<'_>) -> Result<()> {
        (1..self.processes.count()).try_for_each(|process| self.processes.tell(process, order))
    }

    /// Ends the processes, and waits until they have.
    fn end(self, failed: bool) {
        if failed || self.tell(&None).is_err() {
            self.processes.abort("the engine has ended");
        }
        for watcher in self.watchers {
            // A watcher has noted what it saw.
            drop(watcher.join());
        }
    }
}

/// Waits for a process to end. If it does so unasked, the ranks of this process end with an error that names it.
fn watch(process: usize, processes: &Processes, failure: &Failure) {
    // A process says that it ends when it is asked to; else its connection does.
    if let Err(error) = processes.hear::<()>(process) {
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
        while let Some(command) = processes.hear::<Order<'_>>(0)? {
            executor.order(command.into_owned())?;
        }
        executor.synchronize("the last step")?;
        processes.tell(0, &())
    }));
    let done = done.unwrap_or_else(|panic| {
        Err(Error::new(Code::Panic, format!("it panicked: {}", panic_message(&*panic))).into())
    });
    if let Err(error) = &done {
        executor.abort(&reason(error));
    }
    processes.checked(done)
}

/// Runs commands until rank 0 has no more, or one fails. Between commands it watches the groups of the rank: a collective that fails on
/// the device fails after its command, and rank 0 may wait for what comes of it.
fn follow(mut executor: Executor, commands: &Receiver<Command>, mesh: &MeshRank, failure: &Failure) {
    loop {
        let done = match commands.recv_timeout(WATCH_INTERVAL) {
            Ok(command) => catch_unwind(AssertUnwindSafe(|| executor.order(command))),
            Err(RecvTimeoutError::Timeout) => Ok(mesh.status().map_err(EngineError::from)),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let reason = match done {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => reason(&error),
            Err(panic) => format!("it panicked: {}", panic_message(&*panic)),
        };
        tracing::error!(rank = mesh.rank(), %reason, "a rank failed");
        // If another rank failed before, its abort is the reason of this failure.
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
