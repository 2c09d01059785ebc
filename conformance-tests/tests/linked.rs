//! Holds the backends that are linked into the tests to the suite: one test per op and element type, and one per check. Those
//! of a backend without a device here are skipped, which says why.
//!
//! `cargo test -p dsrun-conformance --test linked -- candle::paged_attention` runs one op of one backend.

#![allow(clippy::print_stdout, reason = "a test that skips says why")]

use dsrun_candle::CandleBackend;
use dsrun_conformance::{
    case::Case,
    cases::{TABLES, Table},
    checks::{CHECKS, Check},
    runner::{self, Report, Status, lowering},
    subject::Subject,
};
use dsrun_core::{
    DType,
    device::{Backend, DeviceOptions},
    op::Op,
};
use dsrun_cuda::CudaBackend;
use libtest_mimic::{Arguments, Failed, Trial};
use std::sync::Arc;

/// Failures of a table that are shown in full; of the rest the identifiers are.
const SHOWN: usize = 12;

fn main() {
    let backends: [Arc<dyn Backend>; 2] = [Arc::new(CandleBackend::new()), Arc::new(CudaBackend::new())];
    let trials = backends.into_iter().flat_map(trials).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// The tests of a backend.
fn trials(backend: Arc<dyn Backend>) -> Vec<Trial> {
    let name = backend.info().name.clone();
    let reason = match backend.devices() {
        Ok(devices) if devices.is_empty() => Some("there is no device".to_owned()),
        Ok(_) => None,
        Err(error) => Some(error.to_string()),
    };
    if let Some(reason) = &reason {
        println!("{name} skipped: {reason}");
    }
    let mut trials = Vec::new();
    for table in TABLES {
        for dtype in table.dtypes.iter().copied() {
            let backend = backend.clone();
            let title = format!("{name}::{}::{dtype}", table.op);
            trials.push(Trial::test(title, move || hold(&subject(backend)?, table, dtype)));
        }
    }
    for check in CHECKS {
        let backend = backend.clone();
        let title = format!("{name}::check::{}", check.id);
        trials.push(Trial::test(title, move || hold_check(&subject(backend)?, check)));
    }
    trials.into_iter().map(|trial| trial.with_ignored_flag(reason.is_some())).collect()
}

fn subject(backend: Arc<dyn Backend>) -> Result<Subject, Failed> {
    // One thread each: the tests already run side by side.
    let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
    Ok(Subject::linked(backend, 0, options)?)
}

/// Runs all cases of a table for an element type.
fn hold(subject: &Subject, table: &Table, dtype: DType) -> Result<(), Failed> {
    let mut reports = Vec::new();
    for case in (table.cases)(dtype) {
        let devices = subject.ranks(case.calls.len())?;
        reports.push(settle(runner::run(&case, &devices), &case, subject));
        if matches!(case.calls[0].op, Op::Region(_)) {
            reports.push(lowering::run(&case, &devices[0]));
        }
    }
    let wrong: Vec<&Report> = reports.iter().filter(|report| !report.passed()).collect();
    if wrong.is_empty() {
        return Ok(());
    }
    let mut message = format!("{} of {} cases\n", wrong.len(), reports.len());
    for report in wrong.iter().take(SHOWN) {
        message.push_str(&format!("  {report}\n"));
    }
    for report in wrong.iter().skip(SHOWN) {
        message.push_str(&format!("  {}\n", report.id));
    }
    Err(message.into())
}

/// What a device does not run counts as passed only if it is optional: a region, which can be lowered, or an op of a profile
/// the device does not claim.
fn settle(report: Report, case: &Case, subject: &Subject) -> Report {
    let signatures = case.calls.iter().filter_map(|call| call.op.signature());
    let claimed = signatures.into_iter().any(|signature| subject.claims(signature.profile));
    match report.status {
        Status::Unsupported(_) if !claimed => Report { status: Status::Passed, ..report },
        _ => report,
    }
}

fn hold_check(subject: &Subject, check: &Check) -> Result<(), Failed> {
    let report = check.report(subject);
    let asked = check.profile.is_some_and(|profile| subject.claims(profile));
    match report.status {
        Status::Passed => Ok(()),
        Status::Unsupported(_) if !asked => Ok(()),
        _ => Err(report.to_string().into()),
    }
}
