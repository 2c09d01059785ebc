//! Holds the CUDA backend to every case table: one test per op and element type. Skipped, and says why, where there is no
//! device.
//!
//! `cargo test -p dsrun-conformance --test cuda -- paged_attention` runs one op.

#![allow(clippy::print_stdout, reason = "a test that skips says why")]

use dsrun_conformance::{
    case::Case,
    cases::{TABLES, Table},
    runner::{self, Report, Status, lowering},
};
use dsrun_core::{
    DType,
    device::{Backend, Device, DeviceOptions},
    op::Op,
};
use dsrun_cuda::CudaBackend;
use libtest_mimic::{Arguments, Failed, Trial};

/// Failures of a table that are shown in full; of the rest the identifiers are.
const SHOWN: usize = 12;

fn main() {
    let reason = match CudaBackend::new().devices() {
        Ok(devices) if devices.is_empty() => Some("there is no device".to_owned()),
        Ok(_) => None,
        Err(error) => Some(error.to_string()),
    };
    if let Some(reason) = &reason {
        println!("skipped: {reason}");
    }
    let missing = reason.is_some();
    let trials = TABLES.iter().flat_map(|table| table.dtypes.iter().map(move |dtype| (table, *dtype)));
    let trials = trials.map(|(table, dtype)| {
        Trial::test(format!("{}::{dtype}", table.op), move || hold(table, dtype)).with_ignored_flag(missing)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}

/// Runs all cases of a table for an element type.
fn hold(table: &Table, dtype: DType) -> Result<(), Failed> {
    let device = CudaBackend::new().open(0, &DeviceOptions::default())?;
    let devices = [device.clone()];
    let mut reports = Vec::new();
    for case in (table.cases)(dtype) {
        reports.push(settle(runner::run(&case, &devices), &case, &*device));
        if matches!(case.calls[0].op, Op::Region(_)) {
            reports.push(lowering::run(&case, &device));
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
fn settle(report: Report, case: &Case, device: &dyn Device) -> Report {
    let claimed = case
        .calls
        .iter()
        .filter_map(|call| call.op.signature())
        .any(|signature| device.properties().profiles.contains(&signature.profile));
    match report.status {
        Status::Unsupported(_) if !claimed => Report { status: Status::Passed, ..report },
        _ => report,
    }
}
