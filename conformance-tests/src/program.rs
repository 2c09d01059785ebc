//! The program `dsrun-conformance`: loads a backend, runs the suite in child processes, and reports the results.
//!
//! [`main`] is the whole program, for a list of backends that are linked in. A backend written in Rust can thus be tested
//! without being a plugin, by a program of one line.
//!
//! The parent runs no code of the backend. It starts itself again as a worker, once for each job, and the two exchange lines of
//! JSON over pipes. If a worker crashes or hangs while a case runs, that is the result of the case, and a new worker continues
//! with the next one.

mod arguments;
mod backend;
mod child;
mod interrupt;
mod junit;
mod markdown;
mod message;
mod record;
mod summary;
mod supervisor;
mod table;
mod text;
mod times;
mod waivers;
mod worker;

use crate::suite::{DRAWN, Group, groups, large_groups};
use anyhow::{Context, Result};
use arguments::{Arguments, Command, List, Run};
use clap::Parser;
use dsrun_core::{device::Backend, op::Profile};
use indicatif::{ProgressBar, ProgressStyle};
use record::Record;
use std::{
    env, fs,
    io::{self, IsTerminal, Write},
    num::NonZeroUsize,
    path::Path,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use summary::{Asked, Summary};
use supervisor::{Plan, Results, Unit};
use text::{Style, WIDTH};
use times::Reference;
use waivers::Waivers;

/// The exit status if a case failed.
const FAILED: u8 = 1;
/// The exit status if no case could be run.
const UNUSABLE: u8 = 2;
/// The default limit of jobs: each of them holds an open device.
const JOBS: usize = 16;

/// Runs the program with the arguments of this process; `linked` are the backends that need no plugin to be found by name.
pub fn main(linked: &[Arc<dyn Backend>]) -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Run(arguments) => run(&arguments),
        Command::List(arguments) => list(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Worker(arguments) => worker::run(&arguments, linked).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        // The reader of the output has closed the pipe (`dsrun-conformance list | head`).
        let kind = error.root_cause().downcast_ref::<io::Error>().map(io::Error::kind);
        if kind == Some(io::ErrorKind::BrokenPipe) {
            return ExitCode::SUCCESS;
        }
        let _ = writeln!(io::stderr(), "error: {error:#}");
        ExitCode::from(if interrupt::happened() { interrupt::STATUS } else { UNUSABLE })
    })
}

fn run(arguments: &Run) -> Result<ExitCode> {
    interrupt::listen()?;
    let waivers = arguments.waivers.as_deref().map(Waivers::read).transpose()?.unwrap_or_default();
    let reference = arguments.compare.as_deref().map(Reference::read).transpose()?;
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let plan = Plan {
        target: arguments.target.clone(),
        jobs: arguments.jobs.map_or(cores.min(JOBS), NonZeroUsize::get),
        timeout: Duration::from_secs(arguments.timeout),
        seed: arguments.selection.seed,
        drawn: DRAWN,
        soak: arguments.soak.map(Duration::from_secs),
    };
    let started = Instant::now();
    let identity = plan.identify()?;
    let claimed: Vec<Profile> = Profile::ALL
        .into_iter()
        .filter(|profile| identity.profiles.iter().any(|name| name == profile.name()))
        .collect();
    let profiles = backend::profiles(&arguments.target.profile, &claimed);
    for profile in profiles.iter().filter(|profile| !claimed.contains(profile)) {
        note(&format!("note: the device does not claim {}", profile.name()));
    }
    let units = units(arguments, &profiles)?;
    let progress = Progress::new();
    let Results { mut records, soaked } = plan.run(&units, &|record| progress.observe(record))?;
    progress.finish();
    waivers.apply(&mut records, jiff::Zoned::now().date());
    for id in waivers.unused(&records) {
        note(&format!("note: {id} is waived, and was not run"));
    }
    let Plan { seed, drawn, .. } = plan;
    let asked = Asked { profiles: &profiles, device: plan.target.device, seed, drawn, soaked };
    let summary = Summary::new(asked, identity, records, started.elapsed())?;
    if let Some(path) = &arguments.json {
        write(path, &(serde_json::to_string_pretty(&summary)? + "\n"))?;
    }
    if let Some(path) = &arguments.junit {
        write(path, &junit::render(&summary))?;
    }
    if let Some(path) = &arguments.markdown {
        write(path, &markdown::render(&summary))?;
    }
    io::stdout().lock().write_all(text::render(&summary, reference.as_ref(), style()).as_bytes())?;
    Ok(if summary.passed { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

/// Selects what to run: the cases that were named, or the groups of the profiles.
fn units(arguments: &Run, profiles: &[Profile]) -> Result<Vec<Unit>> {
    if !arguments.case.is_empty() {
        let known = |id: &String| {
            Group::of(id)
                .with_context(|| format!("there is no case {id}; `dsrun-conformance list` shows all"))?;
            Ok(Unit::Case(id.clone()))
        };
        return arguments.case.iter().map(known).collect();
    }
    let wanted = |group: &Group| {
        // `send` and `receive` share their cases, in which one rank sends what another receives.
        let is_repeated = group.op() == "receive" && arguments.selection.wants("send");
        group.belongs_to(profiles) && arguments.selection.wants(group.op()) && !is_repeated
    };
    let all = groups().chain(large_groups().filter(|_| arguments.selection.large));
    let units: Vec<Unit> = all.filter(wanted).map(Unit::Group).collect();
    if units.is_empty() {
        let names: Vec<&str> = profiles.iter().map(|profile| profile.name()).collect();
        anyhow::bail!("no op of {} is called {}", names.join(", "), arguments.selection.op.join(" or "));
    }
    Ok(units)
}

fn list(arguments: &List) -> Result<()> {
    let mut output = io::stdout().lock();
    let mut any = false;
    let all = groups().chain(large_groups().filter(|_| arguments.selection.large));
    for group in all.filter(|group| arguments.selection.wants(group.op()) && group.op() != "receive") {
        any = true;
        for id in group.ids(arguments.selection.seed, DRAWN) {
            writeln!(output, "{id}")?;
        }
    }
    anyhow::ensure!(any, "no op is called {}", arguments.selection.op.join(" or "));
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a note to standard error.
fn note(text: &str) {
    // If standard error is closed, the note is dropped.
    let _ = writeln!(io::stderr(), "{text}");
}

fn style() -> Style {
    let is_terminal = io::stdout().is_terminal();
    let width = terminal_size::terminal_size().filter(|_| is_terminal);
    let plain = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
        || env::var_os("TERM").is_some_and(|term| term == "dumb");
    Style {
        width: width.map_or(WIDTH, |(terminal_size::Width(width), _)| usize::from(width)),
        colour: is_terminal && !plain,
    }
}

/// A progress line on the terminal; without a terminal it prints nothing.
struct Progress {
    bar: ProgressBar,
    run: AtomicUsize,
    failed: AtomicUsize,
}

impl Progress {
    fn new() -> Self {
        // indicatif draws only on terminals.
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar, run: AtomicUsize::new(0), failed: AtomicUsize::new(0) }
    }

    fn observe(&self, record: &Record) {
        let run = self.run.fetch_add(1, Ordering::Relaxed) + 1;
        let failed = self.failed.fetch_add(usize::from(record.is_failure()), Ordering::Relaxed)
            + usize::from(record.is_failure());
        self.bar.set_message(format!("{run} cases, {failed} failed; {}", record.id));
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
