//! Holds the backends that are linked into the tests to the suite: one test per op and element type, and one per check. The
//! tests of a backend that has no device on this machine need a GPU.
//!
//! `cargo test -p dsrun-conformance --test linked -- cpu::paged_attention` runs one op of one backend.

#[path = "support/items.rs"]
mod items;

use dsrun_candle::CandleBackend;
use dsrun_conformance::{
    draw::{DrawnId, simplify},
    runner::{Report, Status},
    subject::Subject,
    suite::{DRAWN, Group, Item, groups},
};
use dsrun_core::{
    DType,
    device::{Backend, DeviceOptions},
    op::Profile,
};
use dsrun_cpu::CpuBackend;
use dsrun_cuda::CudaBackend;
use dsrun_test_support::{Missing, Requirement};
use dsrun_wgpu::WgpuBackend;
use items::items_of;
use libtest_mimic::{Completion, Failed, Trial};
use std::{num::NonZero, process::ExitCode, sync::Arc, thread::available_parallelism};

/// Failures of a table that are shown in full; of the rest the identifiers are.
const SHOWN: usize = 12;

/// Cases of an op and element type on a backend whose device may be a GPU's driver that computes on the CPU, and slowly. They are
/// spread evenly over all cases; `dsrun-conformance run` runs all.
const SLICE: usize = 8;

/// How many simpler cases are tried when a drawn one fails.
const TRIES: usize = 200;

fn main() -> ExitCode {
    let all = |_: &Group| true;
    let runs = [
        Run::new("cpu", Arc::new(CpuBackend::new()), all),
        Run::new("candle", Arc::new(CandleBackend::new()), all),
        Run::new("cuda", Arc::new(CudaBackend::new()), all),
        Run::new("wgpu", Arc::new(WgpuBackend::new()), all),
        // Here every weight of more than four rows is longer than a binding.
        Run::new("wgpu_parts", Arc::new(WgpuBackend::with_weight_parts(1)), |group| {
            WEIGHTED.contains(&group.op())
        }),
        // The kernels for cooperative matrices, which software adapters lack.
        Run::new("wgpu_matrices", Arc::new(WgpuBackend::with_emulated_matrices()), |group| {
            MULTIPLYING.contains(&group.op())
                || (group.op() == "attention" && group.dtype() == Some(DType::F16))
        }),
    ];
    // The runs of a group one after the other, so that its items are made once.
    let of = |group: Group| {
        let runs = runs.iter().filter(move |run| (run.keeps)(&group));
        runs.map(move |run| run.trial(group))
    };
    dsrun_test_support::run(groups().flat_map(of).collect())
}

/// The ops that read weights.
const WEIGHTED: &[&str] = &["embed", "linear", "linear_w8a8", "grouped_linear", "head_linear"];

/// The backends that have kernels for i8 caches.
const QUANTISING: &[&str] = &["cpu", "candle"];

/// The ops whose many rows are multiplied by matrices; `attention` is too, in f16.
const MULTIPLYING: &[&str] =
    &["linear", "norm_linear", "linear_add", "mlp_input", "attention_input", "paged_attention"];

/// A backend, and the groups that it is held to.
struct Run {
    name: &'static str,
    backend: Arc<dyn Backend>,
    keeps: fn(&Group) -> bool,
    /// Why it cannot run here.
    missing: Option<Missing>,
    slow: bool,
}

impl Run {
    fn new(name: &'static str, backend: Arc<dyn Backend>, keeps: fn(&Group) -> bool) -> Self {
        let slow = name.starts_with("wgpu");
        let requirement = if slow { Requirement::Adapter } else { Requirement::Gpu };
        let no_device = requirement.missing(format!("{name} finds no device"));
        let missing = match backend.devices() {
            Ok(devices) if devices.is_empty() => Some(no_device),
            Ok(_) => None,
            Err(error) => Some(no_device.with_detail(error)),
        };
        Self { name, backend, keeps, missing, slow }
    }

    fn trial(&self, group: Group) -> Trial {
        let (backend, missing, slow) = (self.backend.clone(), self.missing.clone(), self.slow);
        let quantises = QUANTISING.contains(&self.name);
        let title = format!("{}::{}", self.name, group.name().replace('/', "::"));
        Trial::ignorable_test(title, move || match missing {
            Some(missing) => missing.outcome(),
            None => hold(backend, group, quantises, slow.then_some(SLICE)).map(|()| Completion::Completed),
        })
    }
}

/// Runs the items of a group: all, or so many, spread evenly. `quantises` is whether the backend has kernels for i8 caches.
fn hold(
    backend: Arc<dyn Backend>,
    group: Group,
    quantises: bool,
    slice: Option<usize>,
) -> Result<(), Failed> {
    // One thread each: the tests already run side by side.
    let options = DeviceOptions { threads: Some(1), ..DeviceOptions::default() };
    let subject = Subject::linked(backend, 0, options)?;
    if subject.takes_i8_caches() != quantises {
        return Err(format!("kernels for i8 caches are expected: {quantises}").into());
    }
    // The backends that run all their cases keep weights in blocks and quantise activations, whatever profiles they claim.
    let quantised = (slice.is_none() && subject.claims(Profile::LlmCore1)).then_some(Profile::LlmQuant1);
    let claimed = Profile::ALL.into_iter().filter(|profile| subject.claims(*profile));
    let profiles: Vec<Profile> = claimed.chain(quantised).collect();
    // Each thread may be at another group.
    let kept = available_parallelism().map_or(1, NonZero::get) + 1;
    let items = items_of(group, DRAWN, kept);
    let step = slice.map_or(1, |slice| items.len().div_ceil(slice).max(1));
    let (mut wrong, mut count) = (Vec::new(), 0);
    for item in items.iter().step_by(step) {
        count += 1;
        let report = item.run(&subject);
        if !fails(&report, item, &subject, &profiles) {
            continue;
        }
        wrong.push(simplest(item, &subject, &profiles).unwrap_or(report));
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
