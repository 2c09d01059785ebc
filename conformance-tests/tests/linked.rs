//! Holds the backends that are linked into the tests to the suite: one test per op and element type, and one per check. The
//! tests of a backend that has no device on this machine need a GPU.
//!
//! `cargo test -p dsrun-conformance --test linked -- cpu::paged_attention` runs one op of one backend.

use dsrun_candle::CandleBackend;
use dsrun_conformance::{
    draw::{DrawnId, simplify},
    runner::{Report, Status},
    subject::Subject,
    suite::{DRAWN, Group, Item, SEED, groups},
};
use dsrun_core::{
    device::{Backend, DeviceOptions},
    op::Profile,
};
use dsrun_cpu::CpuBackend;
use dsrun_cuda::CudaBackend;
use dsrun_test_support::Requirement;
use dsrun_wgpu::WgpuBackend;
use libtest_mimic::{Completion, Failed, Trial};
use std::{process::ExitCode, sync::Arc};

/// Failures of a table that are shown in full; of the rest the identifiers are.
const SHOWN: usize = 12;

/// Cases of an op and element type on a backend whose device may be a GPU's driver that computes on the CPU, and slowly. They are
/// spread evenly over all cases; `dsrun-conformance run` runs all.
const SLICE: usize = 8;

/// How many simpler cases are tried when a drawn one fails.
const TRIES: usize = 200;

fn main() -> ExitCode {
    let backends: [Arc<dyn Backend>; 4] = [
        Arc::new(CpuBackend::new()),
        Arc::new(CandleBackend::new()),
        Arc::new(CudaBackend::new()),
        Arc::new(WgpuBackend::new()),
    ];
    let all = |backend: Arc<dyn Backend>| trials(&backend.info().name.clone(), backend, |_| true);
    // Here every weight of more than four rows is longer than a binding.
    let parts = trials("wgpu_parts", Arc::new(WgpuBackend::with_weight_parts(1)), |group| {
        WEIGHTED.contains(&group.op())
    });
    // The kernels for cooperative matrices, which software adapters lack.
    let matrices = trials("wgpu_matrices", Arc::new(WgpuBackend::with_emulated_matrices()), |group| {
        MULTIPLYING.contains(&group.op())
    });
    dsrun_test_support::run(backends.into_iter().flat_map(all).chain(parts).chain(matrices).collect())
}

/// The ops that read weights.
const WEIGHTED: &[&str] = &["embed", "linear", "linear_w8a8", "grouped_linear", "head_linear"];

/// The tests of a backend, of the groups that are `kept`.
fn trials(name: &str, backend: Arc<dyn Backend>, kept: impl Fn(&Group) -> bool) -> Vec<Trial> {
    let slow = name.starts_with("wgpu");
    let requirement = if slow { Requirement::Adapter } else { Requirement::Gpu };
    let no_device = requirement.missing(format!("{name} finds no device"));
    let missing = match backend.devices() {
        Ok(devices) if devices.is_empty() => Some(no_device),
        Ok(_) => None,
        Err(error) => Some(no_device.with_detail(error)),
    };
    let one = |group: Group| {
        let (backend, missing) = (backend.clone(), missing.clone());
        let title = format!("{name}::{}", group.name().replace('/', "::"));
        Trial::ignorable_test(title, move || match missing {
            Some(missing) => missing.outcome(),
            None => hold(backend, group, slow.then_some(SLICE)).map(|()| Completion::Completed),
        })
    };
    groups().filter(kept).map(one).collect()
}

/// The ops whose many rows are multiplied by matrices.
const MULTIPLYING: &[&str] = &["linear", "norm_linear", "linear_add", "mlp_input", "attention_input"];

/// Runs the items of a group: all, or so many, spread evenly.
fn hold(backend: Arc<dyn Backend>, group: Group, slice: Option<usize>) -> Result<(), Failed> {
    // One thread each: the tests already run side by side.
    let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
    let subject = Subject::linked(backend, 0, options)?;
    // The backends that run all their cases keep weights in blocks and quantise activations, whatever profiles they claim.
    let quantised = (slice.is_none() && subject.claims(Profile::LlmCore1)).then_some(Profile::LlmQuant1);
    let claimed = Profile::ALL.into_iter().filter(|profile| subject.claims(*profile));
    let profiles: Vec<Profile> = claimed.chain(quantised).collect();
    let mut items = group.items(SEED, DRAWN);
    if let Some(slice) = slice {
        let step = items.len().div_ceil(slice).max(1);
        items = items.into_iter().step_by(step).collect();
    }
    let count = items.len();
    let mut wrong = Vec::new();
    for item in items {
        let report = item.run(&subject);
        if !fails(&report, &item, &subject, &profiles) {
            continue;
        }
        wrong.push(simplest(&item, &subject, &profiles).unwrap_or(report));
    }
    if wrong.is_empty() {
        return Ok(());
    }
    let mut message = format!("{} of {count} cases\n", wrong.len());
    for (index, report) in wrong.iter().enumerate() {
        let text = if index < SHOWN { report.to_string() } else { report.id.clone() };
        message.push_str(&format!("  {text}\n"));
    }
    Err(message.into())
}

/// What a device does not run is a failure only where a profile it claims asks for it.
fn fails(report: &Report, item: &Item, subject: &Subject, profiles: &[Profile]) -> bool {
    match report.status {
        Status::Passed => false,
        Status::Failed(_) => true,
        Status::Unsupported(_) => item.is_required(subject, profiles),
    }
}

/// The simplest case that fails as a drawn one does.
fn simplest(item: &Item, subject: &Subject, profiles: &[Profile]) -> Option<Report> {
    let (id, choices) = (DrawnId::parse(&item.id)?, item.choices.as_ref()?);
    let run = |id: &DrawnId| {
        let item = Item::find(&id.to_string())?;
        let report = item.run(subject);
        fails(&report, &item, subject, profiles).then_some(report)
    };
    run(&simplify(&id, choices, TRIES, |id| run(id).is_some()))
}
