//! Distributes cases over worker processes, and replaces workers that crash or hang.

use super::{
    arguments::Target,
    backend::Identity,
    child::{Child, Received},
    message::{Event, Request},
    record::{Outcome, Record},
};
use crate::{
    draw::{DrawnId, simplify},
    suite::Group,
};
use anyhow::{Context, Result, bail};
use std::{
    collections::HashSet,
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How many simpler cases are tried for a random case that fails.
const TRIES: usize = 200;
/// How many simpler cases are tried for one that crashes, where every try costs a process.
const TRIES_OF_CRASH: usize = 40;
/// The time limit of the search for the simplest case.
const SEARCH_TIME: Duration = Duration::from_secs(20);
/// How many cases of a group may crash or time out before the rest of the group is abandoned.
const FAILURE_LIMITS: [(Outcome, usize); 2] = [(Outcome::Crash, 10), (Outcome::Timeout, 3)];
/// Follows a group's name in the id of the record for its abandoned cases.
const NOT_RUN: &str = "/not_run";
/// The check that fails if the backend has written to standard output, which only this side sees.
const PROCESS_UNTOUCHED: &str = "check/process_untouched";
/// The minimum time limit for loading a backend, which may compile kernels.
const LOADING: Duration = Duration::from_secs(120);

/// The configuration of a run.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) target: Target,
    pub(crate) jobs: usize,
    /// The time limit of a case.
    pub(crate) timeout: Duration,
    /// How long to repeat the cases with other seeds, once all have run.
    pub(crate) soak: Option<Duration>,
    pub(crate) seed: u64,
    pub(crate) drawn: usize,
}

/// The cases that a worker is asked for at once.
#[derive(Clone, Debug)]
pub(crate) enum Unit {
    Group(Group),
    Case(String),
}

/// All that a run has found.
#[derive(Debug)]
pub(crate) struct Results {
    /// The records of all cases, in the order of the units, then failures of the soak.
    pub(crate) records: Vec<Record>,
    /// The number of cases that the soak has run.
    pub(crate) soaked: usize,
}

/// How a request to a worker ended.
enum Finish {
    Done,
    /// The worker crashed, hung or lost its device; cases may remain.
    Broken,
    /// No case has the requested id.
    Unknown,
}

impl Plan {
    /// Loads the backend in a worker and returns its identity.
    ///
    /// # Errors
    /// If the backend cannot be loaded.
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
        match child.receive(self.timeout.max(LOADING))? {
            Received::Event(Event::Ready(identity)) => Ok((child, identity)),
            Received::Event(Event::Unusable(reason)) => bail!("{reason}"),
            Received::Event(_) => bail!("the worker process did not identify backend {backend}"),
            Received::Timeout => {
                bail!("loading {backend} did not finish within {} s", self.timeout.max(LOADING).as_secs())
            }
            Received::Exited(how) => {
                bail!(with_lines(format!("loading {backend} crashed: the process {how}"), &child))
            }
        }
    }

    /// Runs all units in parallel worker processes, and with [`Self::soak`] again and again in the same processes, with another
    /// seed each time. `observe` is called with every record as it arrives.
    ///
    /// # Errors
    /// If no case has a requested id, the backend cannot be loaded again, or Ctrl-C was pressed.
    pub(crate) fn run(&self, units: &[Unit], observe: &(dyn Fn(&Record) + Sync)) -> Result<Results> {
        let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
        // The soak begins when the last unit has been taken.
        let soaks_until: OnceLock<Instant> = OnceLock::new();
        let (failed, soaked) = (AtomicBool::new(false), AtomicUsize::new(0));
        // What has failed before the soak is known, and perhaps waived.
        let known: Mutex<HashSet<String>> = Mutex::default();
        let done: Mutex<Vec<(usize, Vec<Record>)>> = Mutex::default();
        let work = || -> Result<()> {
            let mut slot = Slot { plan: self, child: None, seed: self.seed, observe };
            while !stopped.load(Ordering::Relaxed) {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let round = index / units.len().max(1);
                if round > 0 {
                    let Some(time) = self.soak else { break };
                    let until = *soaks_until.get_or_init(|| Instant::now() + time);
                    if failed.load(Ordering::Relaxed) || Instant::now() >= until {
                        break;
                    }
                }
                let Some(unit) = units.get(index % units.len().max(1)) else { break };
                slot.seed = self.seed.wrapping_add(round as u64);
                let mut records = slot.run(unit)?;
                let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
                if round == 0 {
                    known.extend(
                        records.iter().filter(|record| record.is_failure()).map(|record| record.id.clone()),
                    );
                } else {
                    soaked.fetch_add(records.len(), Ordering::Relaxed);
                    records.retain(|record| record.is_failure() && !known.contains(&record.id));
                    failed.fetch_or(!records.is_empty(), Ordering::Relaxed);
                    let note = format!("this failed in round {round} of the soak; alone, the case may pass");
                    records.iter_mut().for_each(|record| record.messages.push(note.clone()));
                }
                done.lock().unwrap_or_else(PoisonError::into_inner).push((index, records));
            }
            Ok(())
        };
        let work = || work().inspect_err(|_| stopped.store(true, Ordering::Relaxed));
        thread::scope(|scope| {
            let slots: Vec<_> = (0..self.jobs.min(units.len())).map(|_| scope.spawn(work)).collect();
            let results: Vec<_> = slots.into_iter().map(thread::ScopedJoinHandle::join).collect();
            results
                .into_iter()
                .try_for_each(|result| result.unwrap_or_else(|_| bail!("this program panicked")))
        })?;
        let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        done.sort_by_key(|(index, _)| *index);
        let records = done.into_iter().flat_map(|(_, records)| records).collect();
        Ok(Results { records, soaked: soaked.into_inner() })
    }

    /// The command line that runs one case or one op.
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

/// Quotes a word for a shell.
fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-@,:+=".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

impl Unit {
    fn request(&self, plan: &Plan, seed: u64, skip: &[String]) -> Request {
        match self {
            Self::Group(group) => {
                Request::Group { name: group.name(), seed, drawn: plan.drawn, skip: skip.to_vec() }
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

/// The record for the abandoned cases of a group, if too many of its cases have crashed or timed out.
fn abandoned(records: &[Record], unit: &Unit) -> Option<Record> {
    let count = |outcome| records.iter().filter(|record| record.status == outcome).count();
    let (outcome, broken) = FAILURE_LIMITS
        .into_iter()
        .map(|(outcome, most)| (outcome, count(outcome), most))
        .find_map(|(outcome, count, most)| (count >= most).then_some((outcome, count)))?;
    let message = format!(
        "the rest of {} was not run: {broken} of its cases ended in `{}`",
        unit.name(),
        outcome.name()
    );
    Some(Record::new(&format!("{}{NOT_RUN}", unit.name()), outcome, vec![message]))
}

/// A place for one worker process at a time.
struct Slot<'a> {
    plan: &'a Plan,
    child: Option<Child>,
    /// The seed of random cases.
    seed: u64,
    observe: &'a (dyn Fn(&Record) + Sync),
}

impl Slot<'_> {
    /// Runs a unit, starting a new worker whenever one breaks.
    fn run(&mut self, unit: &Unit) -> Result<Vec<Record>> {
        let mut records: Vec<Record> = Vec::new();
        loop {
            let skip: Vec<String> = records.iter().map(|record| record.id.clone()).collect();
            let observe = self.observe;
            let finish =
                self.request(&unit.request(self.plan, self.seed, &skip), &unit.name(), &mut |record| {
                    observe(&record);
                    records.push(record);
                })?;
            match (finish, unit) {
                (Finish::Unknown, _) => {
                    bail!("there is no case {}; `dsrun-conformance list` shows all", unit.name())
                }
                (Finish::Broken, Unit::Group(_)) => {
                    if let Some(record) = abandoned(&records, unit) {
                        (self.observe)(&record);
                        records.push(record);
                        break;
                    }
                }
                _ => break,
            }
        }
        // Most cases of an abandoned group crash, so that a simpler one would explain nothing.
        let whole = abandoned(&records, unit).is_none();
        let drawn = |record: &&mut Record| {
            record.choices.is_some() && matches!(record.status, Outcome::Fail | Outcome::Crash)
        };
        // One is enough: the other failures of the unit most likely have the same cause.
        if whole && let Some(record) = records.iter_mut().find(drawn) {
            record.simplest = self.simplest(record)?.map(Box::new);
        }
        for record in &mut records {
            let id = record.simplest.as_ref().map_or(&record.id, |simplest| &simplest.id);
            record.replay = match unit {
                // A record that belongs to no case is replayed with its whole op.
                Unit::Group(group @ Group::Table(..)) if *id == unit.name() || id.ends_with(NOT_RUN) => {
                    self.plan.command("--op", group.op())
                }
                _ => self.plan.command("--case", id),
            };
        }
        Ok(records)
    }

    /// Sends a request to the worker, and passes its records on.
    fn request(&mut self, request: &Request, name: &str, take: &mut dyn FnMut(Record)) -> Result<Finish> {
        let child = match &mut self.child {
            Some(child) => child,
            empty => {
                let started = self.plan.start().context("the backend loaded once, but not again")?;
                empty.insert(started.0)
            }
        };
        child.send(request)?;
        // What is known of the case that runs, and since when it does.
        let mut current: Option<(Record, Instant)> = None;
        let (status, message) = loop {
            match child.receive(self.plan.timeout)? {
                Received::Event(Event::Begin { id, choices, elements }) => {
                    let record = Record::new(&id, Outcome::Crash, Vec::new());
                    current = Some((Record { choices, elements, ..record }, Instant::now()));
                }
                Received::Event(Event::End(mut record)) => {
                    if record.id == PROCESS_UNTOUCHED
                        && let Some(line) = child.printed()
                    {
                        record.status = Outcome::Fail;
                        record.messages.push(format!("the backend writes to standard output: `{line}`"));
                    }
                    take(*record);
                    current = None;
                }
                Received::Event(Event::Done) => return Ok(Finish::Done),
                Received::Event(Event::Unknown) => return Ok(Finish::Unknown),
                Received::Event(Event::Lost) => {
                    self.child = None;
                    return Ok(Finish::Broken);
                }
                Received::Event(Event::Ready(_) | Event::Unusable(_)) => {}
                Received::Timeout => {
                    break (
                        Outcome::Timeout,
                        format!("did not end within {} s", self.plan.timeout.as_secs()),
                    );
                }
                Received::Exited(how) => break (Outcome::Crash, format!("the process {how}")),
            }
        };
        let what = if current.is_some() { message } else { format!("between cases: {message}") };
        let messages = [what].into_iter().chain(child.last_lines()).collect();
        self.child = None;
        let (record, started) =
            current.unwrap_or_else(|| (Record::new(name, status, Vec::new()), Instant::now()));
        take(Record { status, messages, seconds: started.elapsed().as_secs_f64(), ..record });
        Ok(Finish::Broken)
    }

    /// Searches for the simplest case that fails in the same way as a random one.
    fn simplest(&mut self, record: &Record) -> Result<Option<Record>> {
        let (whole, part) =
            record.id.split_once("/lowered").map_or((&*record.id, ""), |(id, _)| (id, "/lowered"));
        let (Some(id), Some(choices)) = (DrawnId::parse(whole), &record.choices) else { return Ok(None) };
        let tries = if record.status == Outcome::Crash { TRIES_OF_CRASH } else { TRIES };
        let deadline = Instant::now() + SEARCH_TIME;
        let mut best = None;
        let mut stopped = Ok(());
        simplify(&id, choices, tries, |id| {
            if stopped.is_err() || Instant::now() > deadline {
                return false;
            }
            let id = format!("{id}{part}");
            let mut found = None;
            let request = Request::Case { id: id.clone() };
            stopped = self.request(&request, &id, &mut |record| found = Some(record)).map(drop);
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
