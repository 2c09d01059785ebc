//! Runs a case on a device and compares its results with the expected ones.
//!
//! Besides the numbers, every run checks the rules that hold for all calls:
//!
//! - Every tensor and the workspace lie between canaries. Nothing outside the elements of a result may change.
//! - Memory that must not be read (gaps, and rows past an extent) and results hold poison: NaN, or indices out of range, which
//!   differ between operands and results. A second run has plausible values and valid indices there, so that a device that drops
//!   NaN or checks indices does not hide that it has read them. Both runs must give the same bits, with different content of the
//!   workspace.
//! - In the second run, an extent of all rows is above the bound, and an extent of no rows is negative.
//! - While a call is bound, and in a run before the first, operands and extents have other values: a device that keeps what it
//!   must read again goes wrong.
//! - Operands that are not updated must keep their values.
//! - The device must not hold more memory after a call than before it.

mod call;
mod image;
pub mod lowering;

use crate::{
    case::{CallCase, Case},
    verdict::{Verdict, Worst},
};
use call::{CallRun, Stop};
use dsrun_core::{
    Code, Error,
    collective::{Collective, Comm, GroupId},
    device::Device,
};
use std::{fmt, sync::Arc, thread, time::Duration};

/// The time limit of every wait.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// The outcome of a case.
#[derive(Clone, Debug, PartialEq)]
pub enum Status {
    /// All results are right.
    Passed,
    /// Descriptions of what is wrong, each one a sentence.
    Failed(Vec<String>),
    /// The device does not support the case, with its reason.
    Unsupported(String),
}

/// The result of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The id of the case.
    pub id: String,
    /// The outcome.
    pub status: Status,
    /// The comparison of each result, with its name, for one rank after the other.
    pub verdicts: Vec<(String, Verdict)>,
}

impl Report {
    /// Whether the case passed.
    pub fn passed(&self) -> bool {
        self.status == Status::Passed
    }

    /// The float element with the largest ratio of error to limit.
    pub fn worst(&self) -> Option<&Worst> {
        let all = self.verdicts.iter().filter_map(|(_, verdict)| verdict.worst.as_ref());
        all.max_by(|a, b| a.ratio.total_cmp(&b.ratio))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.status {
            Status::Passed => write!(f, "{}: passed", self.id),
            Status::Unsupported(reason) => write!(f, "{}: unsupported: {reason}", self.id),
            Status::Failed(failures) => {
                write!(f, "{}: failed", self.id)?;
                failures.iter().try_for_each(|failure| write!(f, "\n    {failure}"))
            }
        }
    }
}

/// Runs a case. Rank `i` of a collective runs on `devices[i]`, in a thread of its own, so that there must be as many devices as
/// the case has calls.
pub fn run(case: &Case, devices: &[Arc<dyn Device>]) -> Report {
    judge(case, run_calls(case, devices, &call::run))
}

/// Runs a call of a case, with the group of its ranks if there is one.
type RunCall<'a> =
    dyn Fn(&CallCase, &Arc<dyn Device>, Option<Arc<dyn Comm>>) -> Result<CallRun, Stop> + Sync + 'a;

/// Runs the calls of a case, one on each rank.
fn run_calls(case: &Case, devices: &[Arc<dyn Device>], run: &RunCall<'_>) -> Result<Vec<CallRun>, Stop> {
    match (case.calls.as_slice(), devices) {
        (_, few) if few.len() < case.calls.len() => {
            Err(Stop::Unsupported(format!("needs {} devices, there are {}", case.calls.len(), few.len())))
        }
        ([call], [device, ..]) if call.op.mesh_axis().is_none() => {
            run(call, device, None).map(|run| vec![run])
        }
        _ => run_ranks(case, devices, run),
    }
}

fn judge(case: &Case, result: Result<Vec<CallRun>, Stop>) -> Report {
    let mut report = Report { id: case.id.clone(), status: Status::Passed, verdicts: Vec::new() };
    let runs = match result {
        Ok(runs) => runs,
        Err(Stop::Unsupported(reason)) => return Report { status: Status::Unsupported(reason), ..report },
        Err(Stop::Failed(error)) => return Report { status: Status::Failed(vec![error]), ..report },
    };
    let mut failures = Vec::new();
    if case.alike && runs.iter().any(|run| run.results != runs[0].results) {
        failures.push("ranks got different bits".to_owned());
    }
    for (rank, run) in runs.into_iter().enumerate() {
        let place = if case.calls.len() > 1 { format!("rank {rank}: ") } else { String::new() };
        failures.extend(run.failures.into_iter().map(|failure| format!("{place}{failure}")));
        report
            .verdicts
            .extend(run.verdicts.into_iter().map(|(name, verdict)| (format!("{place}{name}"), verdict)));
    }
    if !failures.is_empty() {
        report.status = Status::Failed(failures);
    }
    report
}

/// Runs every rank in a thread of its own. If one of them fails, it aborts the group, so that the others do not wait.
fn run_ranks(case: &Case, devices: &[Arc<dyn Device>], run_call: &RunCall<'_>) -> Result<Vec<CallRun>, Stop> {
    let collective = devices.first().and_then(|device| device.collective());
    let id = collective
        .ok_or_else(|| Stop::Unsupported("the device has no collectives".into()))?
        .group_id(None)?;
    let ranks = case.calls.len();
    let results: Vec<Result<CallRun, Stop>> = thread::scope(|scope| {
        let run = |rank: usize| {
            let device = &devices[rank];
            let comm = join(device.collective(), &id, rank, ranks)?;
            let result = run_call(&case.calls[rank], device, Some(comm.clone()));
            if result.is_err() {
                comm.abort(call::ABORT_REASON);
            }
            result
        };
        let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
        joined.map(|result| result.unwrap_or_else(|_| Err(Stop::Failed("a rank panicked".into())))).collect()
    });
    // Report the rank that failed first: the others only say that the group was aborted.
    let first = results.iter().position(|result| matches!(result, Err(stop) if !stop.is_abort()));
    let mut results = results;
    if let Some(first) = first {
        return results.swap_remove(first).map(|run| vec![run]);
    }
    results.into_iter().collect()
}

fn join(
    collective: Option<&dyn Collective>,
    id: &GroupId,
    rank: usize,
    ranks: usize,
) -> Result<Arc<dyn Comm>, Error> {
    let missing = || Error::new(Code::Unsupported, "the device has no collectives");
    collective.ok_or_else(missing)?.join(id, rank, ranks, TIMEOUT)
}
