//! Gives work to child processes, and goes on where one has crashed or hangs.

use super::{
    arguments::Target,
    backend::Identity,
    child::{Child, Heard},
    message::{Event, Request},
    record::{Outcome, Record},
};
use crate::{
    draw::{DrawnId, simplify},
    suite::Group,
};
use anyhow::{Context, Result, bail};
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How many simpler cases are tried when a drawn one fails, and when one crashes, where every try costs a process.
const TRIES: [usize; 2] = [200, 40];
/// How long the search for the simplest case may take.
const SEARCH: Duration = Duration::from_secs(20);
/// How many cases of a group may crash, and how many may run out of time, before the rest of it is left.
const PATIENCE: [(Outcome, usize); 2] = [(Outcome::Crash, 10), (Outcome::Timeout, 3)];
/// Behind the name of a group, what stands for the cases that were left.
const NOT_RUN: &str = "/not_run";
/// How long loading a backend may take at least: it may compile.
const LOADING: Duration = Duration::from_secs(120);

/// How to run.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) target: Target,
    pub(crate) jobs: usize,
    /// How long a case may take.
    pub(crate) timeout: Duration,
    pub(crate) seed: u64,
    pub(crate) drawn: usize,
}

/// What is run in one go.
#[derive(Clone, Debug)]
pub(crate) enum Unit {
    Group(Group),
    Case(String),
}

/// What came of a conversation with a child.
enum Finish {
    Done,
    /// The child is gone; there may be more to do.
    Broken,
    /// There is no such case.
    Unknown,
}

impl Plan {
    /// Loads the backend in a child, and hears who it is.
    ///
    /// # Errors
    /// Why it cannot be loaded.
    pub(crate) fn identify(&self) -> Result<Identity> {
        Ok(self.start()?.1)
    }

    fn start(&self) -> Result<(Child, Identity)> {
        let mut arguments = vec!["worker".into(), "--device".into(), self.target.device.to_string()];
        for profile in &self.target.profile {
            arguments.extend(["--profile".to_owned(), profile.name().to_owned()]);
        }
        arguments.extend(["--".to_owned(), self.target.backend.clone()]);
        let mut child = Child::start(&arguments)?;
        let backend = &self.target.backend;
        let with_lines = |what: String, child: &Child| {
            [what].into_iter().chain(child.last_lines()).collect::<Vec<_>>().join("\n  ")
        };
        match child.listen(self.timeout.max(LOADING))? {
            Heard::Event(Event::Ready(identity)) => Ok((child, identity)),
            Heard::Event(Event::Unusable(reason)) => bail!("{reason}"),
            Heard::Event(_) => bail!("the child process said nothing of backend {backend}"),
            Heard::Silence => {
                bail!("loading {backend} did not end in {} s", self.timeout.max(LOADING).as_secs())
            }
            Heard::Ended(how) => {
                bail!(with_lines(format!("loading {backend} crashed: the process {how}"), &child))
            }
        }
    }

    /// Runs all units, side by side in child processes. `observe` is told of every record as it comes; the result has them in
    /// the order of the units.
    ///
    /// # Errors
    /// If there is no case of an id, the backend cannot be loaded again, or Ctrl-C was pressed.
    pub(crate) fn run(&self, units: &[Unit], observe: &(dyn Fn(&Record) + Sync)) -> Result<Vec<Record>> {
        let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
        let done: Mutex<Vec<(usize, Vec<Record>)>> = Mutex::default();
        let work = || -> Result<()> {
            let mut lane = Lane { plan: self, child: None, observe };
            while !stopped.load(Ordering::Relaxed) {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(unit) = units.get(index) else { break };
                let records = lane.run(unit)?;
                done.lock().unwrap_or_else(PoisonError::into_inner).push((index, records));
            }
            Ok(())
        };
        let work = || work().inspect_err(|_| stopped.store(true, Ordering::Relaxed));
        thread::scope(|scope| {
            let lanes: Vec<_> = (0..self.jobs.min(units.len())).map(|_| scope.spawn(work)).collect();
            let results: Vec<_> = lanes.into_iter().map(thread::ScopedJoinHandle::join).collect();
            results
                .into_iter()
                .try_for_each(|result| result.unwrap_or_else(|_| bail!("this program panicked")))
        })?;
        let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        done.sort_by_key(|(index, _)| *index);
        Ok(done.into_iter().flat_map(|(_, records)| records).collect())
    }

    /// The command that runs one case alone, or one op.
    fn command(&self, option: &str, of: &str) -> String {
        let program = std::env::args().next().unwrap_or_else(|| "dsrun-conformance".into());
        let mut words = vec![program, "run".into(), self.target.backend.clone()];
        if self.target.device != 0 {
            words.extend(["--device".into(), self.target.device.to_string()]);
        }
        if !self.target.profile.is_empty() {
            let names: Vec<&str> = self.target.profile.iter().map(|profile| profile.name()).collect();
            words.extend(["--profile".into(), names.join(",")]);
        }
        words.extend([option.into(), of.into()]);
        let quoted: Vec<String> = words.iter().map(|word| quote(word)).collect();
        quoted.join(" ")
    }
}

/// A word as a shell reads it.
fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-@,:+=".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

impl Unit {
    fn request(&self, plan: &Plan, skip: &[String]) -> Request {
        match self {
            Self::Group(group) => {
                Request::Group { name: group.name(), seed: plan.seed, drawn: plan.drawn, skip: skip.to_vec() }
            }
            Self::Case(id) => Request::Case { id: id.clone() },
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Group(group) => group.name(),
            Self::Case(id) => id.clone(),
        }
    }
}

/// Says that a group is left before its end, if it is: what broke so often would go on to break.
fn given_up(records: &[Record], unit: &Unit) -> Option<Record> {
    let count = |outcome| records.iter().filter(|record| record.status == outcome).count();
    let (outcome, broken) = PATIENCE
        .into_iter()
        .map(|(outcome, most)| (outcome, count(outcome), most))
        .find_map(|(outcome, count, most)| (count >= most).then_some((outcome, count)))?;
    let message =
        format!("the rest of {} was not run after {broken} times `{}`", unit.name(), outcome.name());
    Some(Record::new(&format!("{}{NOT_RUN}", unit.name()), outcome, vec![message]))
}

/// One child at a time.
struct Lane<'a> {
    plan: &'a Plan,
    child: Option<Child>,
    observe: &'a (dyn Fn(&Record) + Sync),
}

impl Lane<'_> {
    /// Runs a unit, in as many children as it takes.
    fn run(&mut self, unit: &Unit) -> Result<Vec<Record>> {
        let mut records: Vec<Record> = Vec::new();
        loop {
            let skip: Vec<String> = records.iter().map(|record| record.id.clone()).collect();
            let observe = self.observe;
            let finish = self.converse(&unit.request(self.plan, &skip), &unit.name(), &mut |record| {
                observe(&record);
                records.push(record);
            })?;
            match (finish, unit) {
                (Finish::Unknown, _) => {
                    bail!("there is no case {}; `dsrun-conformance list` shows all", unit.name())
                }
                (Finish::Broken, Unit::Group(_)) => {
                    if let Some(record) = given_up(&records, unit) {
                        (self.observe)(&record);
                        records.push(record);
                        break;
                    }
                }
                _ => break,
            }
        }
        // One that is given up crashes throughout: there is nothing to learn from a simpler case.
        let whole = given_up(&records, unit).is_none();
        let drawn = |record: &&mut Record| {
            record.choices.is_some() && matches!(record.status, Outcome::Fail | Outcome::Crash)
        };
        // The others of the unit most likely fail for the same reason.
        if whole && let Some(record) = records.iter_mut().find(drawn) {
            record.simplest = self.simplest(record)?.map(Box::new);
        }
        for record in &mut records {
            let id = record.simplest.as_ref().map_or(&record.id, |simplest| &simplest.id);
            record.replay = match unit {
                // What belongs to no case is run again with all of its op.
                Unit::Group(group @ Group::Table(..)) if *id == unit.name() || id.ends_with(NOT_RUN) => {
                    self.plan.command("--op", group.op())
                }
                _ => self.plan.command("--case", id),
            };
        }
        Ok(records)
    }

    /// Asks a child for something, and passes on what comes of it.
    fn converse(&mut self, request: &Request, name: &str, take: &mut dyn FnMut(Record)) -> Result<Finish> {
        let child = match &mut self.child {
            Some(child) => child,
            empty => {
                let started = self.plan.start().context("the backend loaded once, but not again")?;
                empty.insert(started.0)
            }
        };
        child.ask(request)?;
        let mut current: Option<(String, Option<Vec<usize>>, Instant)> = None;
        let (status, message) = loop {
            match child.listen(self.plan.timeout)? {
                Heard::Event(Event::Begin { id, choices }) => current = Some((id, choices, Instant::now())),
                Heard::Event(Event::End(record)) => {
                    take(*record);
                    current = None;
                }
                Heard::Event(Event::Done) => return Ok(Finish::Done),
                Heard::Event(Event::Unknown) => return Ok(Finish::Unknown),
                Heard::Event(Event::Lost) => {
                    self.child = None;
                    return Ok(Finish::Broken);
                }
                Heard::Event(Event::Ready(_) | Event::Unusable(_)) => {}
                Heard::Silence => {
                    break (
                        Outcome::Timeout,
                        format!("did not end within {} s", self.plan.timeout.as_secs()),
                    );
                }
                Heard::Ended(how) => break (Outcome::Crash, format!("the process {how}")),
            }
        };
        let what = if current.is_some() { message } else { format!("between cases: {message}") };
        let messages = [what].into_iter().chain(child.last_lines()).collect();
        self.child = None;
        let (id, choices, started) = current.unwrap_or_else(|| (name.to_owned(), None, Instant::now()));
        let seconds = started.elapsed().as_secs_f64();
        take(Record { choices, seconds, ..Record::new(&id, status, messages) });
        Ok(Finish::Broken)
    }

    /// The simplest case that fails as a drawn one does, if there is a simpler one.
    fn simplest(&mut self, record: &Record) -> Result<Option<Record>> {
        let (whole, part) =
            record.id.split_once("/lowered").map_or((&*record.id, ""), |(id, _)| (id, "/lowered"));
        let (Some(id), Some(choices)) = (DrawnId::parse(whole), &record.choices) else { return Ok(None) };
        let tries = TRIES[usize::from(record.status == Outcome::Crash)];
        let deadline = Instant::now() + SEARCH;
        let mut best = None;
        let mut stopped = Ok(());
        simplify(&id, choices, tries, |id| {
            if stopped.is_err() || Instant::now() > deadline {
                return false;
            }
            let id = format!("{id}{part}");
            let mut found = None;
            let request = Request::Case { id: id.clone() };
            stopped = self.converse(&request, &id, &mut |record| found = Some(record)).map(drop);
            match found {
                Some(found) if found.status == record.status => {
                    best = Some(found);
                    true
                }
                _ => false,
            }
        });
        stopped?;
        Ok(best.map(|found| Record { replay: self.plan.command("--case", &found.id), ..found }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("linear/bf16/property-1f3a@2.0.1", "linear/bf16/property-1f3a@2.0.1")]
    #[case("a b", "'a b'")]
    #[case("it's", r"'it'\''s'")]
    #[case("", "''")]
    #[case("$HOME", "'$HOME'")]
    fn words_are_quoted_for_shells(#[case] word: &str, #[case] quoted: &str) {
        assert_eq!(quote(word), quoted);
    }
}
