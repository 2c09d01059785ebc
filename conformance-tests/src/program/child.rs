//! A child process, seen from its parent.

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

/// How often a wait looks around for other reasons to end.
const LOOK: Duration = Duration::from_millis(50);
/// How long the last words of a process that has ended may take to arrive.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Lines of a child's standard error that are kept, and letters of each.
const TAIL: (usize, usize) = (10, 300);

/// A running child.
pub(crate) struct Child {
    process: process::Child,
    input: Option<ChildStdin>,
    events: Receiver<Event>,
    /// Ends when standard error does.
    errors: Receiver<()>,
    tail: Arc<Tail>,
}

/// What a parent hears when it listens.
pub(crate) enum Heard {
    Event(Event),
    /// Nothing, for too long.
    Silence,
    /// The process has ended, in this way.
    Ended(String),
}

/// The last lines that a child wrote for nobody in particular.
#[derive(Default)]
struct Tail(Mutex<VecDeque<String>>);

impl Tail {
    fn push(&self, line: &str) {
        let line = line.trim_end();
        if line.is_empty() {
            return;
        }
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL.0 {
            lines.pop_front();
        }
        lines.push_back(line.chars().take(TAIL.1).collect());
    }
}

impl Child {
    /// Starts this program again, as a worker.
    pub(crate) fn start(arguments: &[String]) -> Result<Self> {
        let program = std::env::current_exe().context("this program does not know its own file")?;
        let mut process = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("a child process cannot be started")?;
        let input = process.stdin.take();
        let tail = Arc::new(Tail::default());
        let (event_sender, events) = mpsc::channel();
        let (error_sender, errors) = mpsc::channel();
        if let Some(output) = process.stdout.take() {
            let tail = tail.clone();
            thread::spawn(move || read_events(output, &event_sender, &tail));
        }
        if let Some(output) = process.stderr.take() {
            let tail = tail.clone();
            thread::spawn(move || {
                each_line(output, |line| tail.push(line));
                drop(error_sender);
            });
        }
        Ok(Self { process, input, events, errors, tail })
    }

    /// Asks for something. That the child has ended is heard, not told here.
    pub(crate) fn ask(&mut self, request: &Request) -> Result<()> {
        let line = format!("{}\n", serde_json::to_string(request)?);
        if let Some(input) = &mut self.input {
            let _ = input.write_all(line.as_bytes()).and_then(|()| input.flush());
        }
        Ok(())
    }

    /// Waits for what the child tells next.
    ///
    /// # Errors
    /// If Ctrl-C was pressed.
    pub(crate) fn listen(&mut self, patience: Duration) -> Result<Heard> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left.min(LOOK)) {
                Ok(event) => return Ok(Heard::Event(event)),
                Err(RecvTimeoutError::Disconnected) => return Ok(Heard::Ended(self.end(patience))),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if interrupt::happened() {
                anyhow::bail!("interrupted");
            }
            // What a process wrote before it ended is heard first, even if a child of its own still holds the pipe.
            if self.process.try_wait()?.is_some() {
                return Ok(match self.events.recv_timeout(LAST_WORDS) {
                    Ok(event) => Heard::Event(event),
                    Err(_) => Heard::Ended(self.end(patience)),
                });
            }
            if left.is_zero() {
                return Ok(Heard::Silence);
            }
        }
    }

    /// The last lines it wrote to standard error.
    pub(crate) fn last_lines(&self) -> Vec<String> {
        // Nothing is ever sent: this waits for the end of standard error.
        let _ = self.errors.recv_timeout(LAST_WORDS);
        self.tail.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// How the process ended: its standard output has.
    fn end(&mut self, patience: Duration) -> String {
        let deadline = Instant::now() + patience;
        loop {
            match self.process.try_wait() {
                Ok(Some(status)) => return describe(status),
                Ok(None) if Instant::now() < deadline => thread::sleep(LOOK),
                Ok(None) => return "closed its standard output and went on".into(),
                Err(error) => return format!("ended, nobody knows how: {error}"),
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It may have ended already; after this it certainly has, and nothing of it stays behind.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn read_events(output: impl Read, events: &Sender<Event>, tail: &Tail) {
    each_line(output, |line| match line.split_once(MARK) {
        Some((before, message)) => {
            tail.push(before);
            match serde_json::from_str(message) {
                Ok(event) => drop(events.send(event)),
                Err(_) => tail.push(line),
            }
        }
        None => tail.push(line),
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

/// How a process ended, for people.
fn describe(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        let name = match signal {
            4 => " (SIGILL: an instruction this processor does not have)",
            6 => " (SIGABRT: it gave up)",
            7 => " (SIGBUS: memory that is not there)",
            8 => " (SIGFPE: division by zero)",
            9 => " (SIGKILL: somebody killed it, perhaps for want of memory)",
            11 => " (SIGSEGV: memory that is not its own)",
            _ => "",
        };
        return format!("ended by signal {signal}{name}");
    }
    status.code().map_or_else(|| "ended".into(), |code| format!("ended with exit status {code}"))
}
