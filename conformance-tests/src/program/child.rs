//! The parent's end of a worker process.

use super::{
    interrupt,
    message::{Event, MARK, Request},
};
use anyhow::{Context, Result};
use std::{
    collections::VecDeque,
    io::{BufRead, BufReader, Read, Write},
    process::{self, ChildStdin, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

/// How often a wait for an event checks for Ctrl-C and for the end of the process.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How often a wait for the end of a process checks for it.
const END_INTERVAL: Duration = Duration::from_millis(2);
/// How long to wait for the remaining output of a process that has exited.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
/// How long to wait for the end of a process that was killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// The number of lines of a child's other output that are kept.
const TAIL_LINES: usize = 10;
/// The number of characters of each of them.
const TAIL_WIDTH: usize = 300;

/// A running worker process.
pub(crate) struct Child {
    process: process::Child,
    input: Option<ChildStdin>,
    events: Receiver<Event>,
    /// Disconnects when standard error is closed.
    errors: Receiver<()>,
    tail: Arc<Tail>,
    /// What of the tail came from standard output.
    printed: Arc<Tail>,
}

/// The result of waiting for a worker.
pub(crate) enum Received {
    Event(Event),
    /// No event came in time.
    Timeout,
    /// The process has exited, in this way.
    Exited(String),
}

/// The last lines of output that are not events.
#[derive(Default)]
struct Tail(Mutex<VecDeque<String>>);

impl Tail {
    fn push(&self, line: &str) {
        let line = line.trim_end();
        if line.is_empty() {
            return;
        }
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(line.chars().take(TAIL_WIDTH).collect());
    }
}

impl Child {
    /// Starts this program again as a worker.
    pub(crate) fn start(arguments: &[String]) -> Result<Self> {
        let program = std::env::current_exe().context("the path of this program is unknown")?;
        let mut process = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("a child process cannot be started")?;
        let input = process.stdin.take();
        let (tail, printed) = (Arc::new(Tail::default()), Arc::new(Tail::default()));
        let (event_sender, events) = mpsc::channel();
        let (error_sender, errors) = mpsc::channel();
        if let Some(output) = process.stdout.take() {
            let tails = [tail.clone(), printed.clone()];
            thread::spawn(move || read_events(output, &event_sender, &tails));
        }
        if let Some(output) = process.stderr.take() {
            let tail = tail.clone();
            thread::spawn(move || {
                each_line(output, |line| tail.push(line));
                drop(error_sender);
            });
        }
        Ok(Self { process, input, events, errors, tail, printed })
    }

    /// Sends a request. If the child has exited, [`Self::receive`] reports it.
    pub(crate) fn send(&mut self, request: &Request) -> Result<()> {
        let line = format!("{}\n", serde_json::to_string(request)?);
        if let Some(input) = &mut self.input {
            let _ = input.write_all(line.as_bytes()).and_then(|()| input.flush());
        }
        Ok(())
    }

    /// Waits for the next event of the child.
    ///
    /// # Errors
    /// If Ctrl-C was pressed.
    pub(crate) fn receive(&mut self, timeout: Duration) -> Result<Received> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left.min(POLL_INTERVAL)) {
                Ok(event) => return Ok(Received::Event(event)),
                Err(RecvTimeoutError::Disconnected) => return Ok(Received::Exited(self.exit(timeout))),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if interrupt::happened() {
                anyhow::bail!("interrupted");
            }
            // Events that were written before the exit come first, even if a child of the process still holds the pipe.
            if self.process.try_wait()?.is_some() {
                return Ok(match self.events.recv_timeout(DRAIN_TIMEOUT) {
                    Ok(event) => Received::Event(event),
                    Err(_) => Received::Exited(self.exit(timeout)),
                });
            }
            if left.is_zero() {
                return Ok(Received::Timeout);
            }
        }
    }

    /// The last lines of output that are not events.
    pub(crate) fn last_lines(&self) -> Vec<String> {
        // The channel carries no messages: this waits until standard error is closed.
        let _ = self.errors.recv_timeout(DRAIN_TIMEOUT);
        self.tail.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// The first of the last lines that the backend has written to standard output.
    pub(crate) fn printed(&self) -> Option<String> {
        self.printed.0.lock().unwrap_or_else(PoisonError::into_inner).front().cloned()
    }

    /// Waits for the exit of a process whose standard output is closed, and describes it.
    fn exit(&mut self, timeout: Duration) -> String {
        let deadline = Instant::now() + timeout;
        loop {
            match self.process.try_wait() {
                Ok(Some(status)) => return describe(status),
                Ok(None) if Instant::now() < deadline => thread::sleep(END_INTERVAL),
                Ok(None) => return "closed its standard output and kept running".into(),
                Err(error) => return format!("ended in an unknown way: {error}"),
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // The process may have exited already. One that waits for a driver may not end even now: it is left behind.
        let _ = self.process.kill();
        let deadline = Instant::now() + KILL_TIMEOUT;
        while matches!(self.process.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(END_INTERVAL);
        }
    }
}

fn read_events(output: impl Read, events: &Sender<Event>, tails: &[Arc<Tail>]) {
    let push = |text: &str| tails.iter().for_each(|tail| tail.push(text));
    each_line(output, |line| match line.split_once(MARK) {
        Some((before, message)) => {
            push(before);
            match serde_json::from_str(message) {
                Ok(event) => drop(events.send(event)),
                Err(_) => push(line),
            }
        }
        None => push(line),
    });
}

fn each_line(output: impl Read, mut take: impl FnMut(&str)) {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    while output.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
        take(&String::from_utf8_lossy(&line));
        line.clear();
    }
}

/// Describes how a process ended.
fn describe(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        let name = match signal {
            4 => " (SIGILL: an instruction that this processor lacks)",
            6 => " (SIGABRT: it aborted)",
            7 => " (SIGBUS: access to memory that does not exist)",
            8 => " (SIGFPE: division by zero)",
            9 => " (SIGKILL: it was killed, perhaps because memory ran out)",
            11 => " (SIGSEGV: access to memory outside its own)",
            _ => "",
        };
        return format!("ended by signal {signal}{name}");
    }
    status.code().map_or_else(|| "ended".into(), |code| format!("ended with exit status {code}"))
}
