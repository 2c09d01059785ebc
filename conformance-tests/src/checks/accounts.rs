//! What a device says of its memory, and what it leaves alone in the process.

use super::{
    bench::{Bench, Outcome, ensure, floats, open},
    jobs::jobs,
    memory::sum_is_right,
};
use crate::{cases::random_weight, random::Random, subject::Subject};
use dsrun_core::{WeightFormat, device::MemoryKind};
use std::{collections::BTreeMap, env, ffi::OsString, fs, hint::black_box, sync::OnceLock};

const MEBIBYTE: usize = 1 << 20;

/// Buffers and weights are counted while they live; what is free shrinks by no more than what is held elsewhere.
pub(super) fn memory(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    // What a device makes once and keeps is made here.
    sum_is_right(&mut bench)?;
    let used = |bench: &Bench| bench.device.memory().used;
    let before = used(&bench);
    for kind in [MemoryKind::Device, MemoryKind::Pinned] {
        let buffers: Vec<_> =
            (0..3).map(|_| bench.device.allocate(MEBIBYTE, kind)).collect::<Result<_, _>>()?;
        let held = used(&bench).saturating_sub(before);
        // Pinned memory is the host's, and need not be counted.
        let least = if kind == MemoryKind::Device { 3 * MEBIBYTE } else { 0 };
        ensure((least..=8 * MEBIBYTE).contains(&(held as usize)), || {
            format!("three mebibytes of {kind:?} memory are counted as {held} bytes")
        })?;
        drop(buffers);
        bench.wait()?;
        let held = used(&bench);
        ensure(held <= before, || {
            format!("{} bytes of {kind:?} memory are still counted after they were freed", held - before)
        })?;
    }
    let dtype = floats(&*bench.device)[0];
    let (weight, _) =
        random_weight(&mut Random::named("accounts"), WeightFormat::Dense(dtype), [512, 512], 0.1);
    let packed = bench.pack(&weight)?;
    bench.wait()?;
    let held = used(&bench).saturating_sub(before) as usize;
    ensure(held >= weight.bytes.len(), || {
        format!("a packed weight of {} bytes is counted as {held} bytes", weight.bytes.len())
    })?;
    drop(packed);
    bench.wait()?;
    let held = used(&bench);
    ensure(held <= before, || {
        format!("{} bytes of a weight are still counted after it was freed", held - before)
    })?;
    if let Some(free) = bench.device.memory().free {
        let buffer = bench.device.allocate(8 * MEBIBYTE, MemoryKind::Device)?;
        let left = bench.device.memory().free;
        // Other programs allocate and free meanwhile.
        ensure(left.is_some_and(|left| left < free || subject.options().memory_limit.is_none()), || {
            format!("{free} bytes are free before eight mebibytes are allocated, and {left:?} after")
        })?;
        drop(buffer);
    }
    Ok(())
}

/// What one handle holds is not counted by another.
pub(super) fn handles(subject: &Subject) -> Outcome {
    let first = open(subject, subject.options())?;
    let second = open(subject, subject.options())?;
    let (before, other) = (first.memory().used, second.memory().used);
    let held = first.allocate(4 * MEBIBYTE, MemoryKind::Device)?;
    ensure(second.memory().used == other, || {
        format!("a handle counts {} bytes more when another one allocates", second.memory().used - other)
    })?;
    ensure(first.memory().used >= before + 4 * MEBIBYTE as u64, || "four mebibytes are not counted".into())?;
    let theirs = second.allocate(MEBIBYTE, MemoryKind::Device)?;
    drop(second);
    drop(held);
    ensure(first.memory().used <= before, || {
        "memory is still counted after another handle was dropped".into()
    })?;
    drop(theirs);
    let mut bench = Bench::new(&first)?;
    sum_is_right(&mut bench)
}

/// The part of a process that belongs to the program.
#[derive(Clone, Debug, PartialEq)]
struct Process {
    environment: BTreeMap<OsString, OsString>,
    folder: Option<std::path::PathBuf>,
    /// The masks of ignored and of caught signals, where the system shows them.
    signals: Vec<String>,
    /// The mask of modes of new files, where the system shows it.
    umask: Option<String>,
}

impl Process {
    fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let masks = status.lines().filter(|line| line.starts_with("SigIgn") || line.starts_with("SigCgt"));
        let umask = status.lines().find(|line| line.starts_with("Umask"));
        Self {
            environment: env::vars_os().collect(),
            folder: env::current_dir().ok(),
            signals: masks.map(str::to_owned).collect(),
            umask: umask.map(str::to_owned),
        }
    }
}

static AT_START: OnceLock<Process> = OnceLock::new();

/// Whether this process runs nothing but the suite, so that what it holds is the backend's.
pub(super) fn in_worker() -> bool {
    AT_START.get().is_some()
}

/// Remembers the state of the process, before a backend is loaded.
pub(crate) fn remember_process() {
    AT_START.get_or_init(Process::now);
}

/// A backend changes nothing that belongs to the program.
pub(super) fn process(subject: &Subject) -> Outcome {
    let before = AT_START.get().cloned().unwrap_or_else(Process::now);
    let device = open(subject, subject.options())?;
    let mut bench = Bench::new(&device)?;
    arithmetic("when a device is opened")?;
    // What is opened once and kept is opened in the first round.
    for round in 0..2 {
        let files = open_files();
        for dtype in floats(&*device) {
            drop(jobs(&mut bench, dtype, 1)?);
            arithmetic(&format!("when calls of {dtype} run"))?;
        }
        ensure(round == 0 || !in_worker() || open_files() <= files, || {
            format!("the backend leaves {} files open after calls that ran before", open_files() - files)
        })?;
    }
    flush_standard_output();
    let after = Process::now();
    let changed = |name: &&OsString| before.environment.get(*name) != after.environment.get(*name);
    let names: Vec<String> = before
        .environment
        .keys()
        .chain(after.environment.keys())
        .filter(changed)
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    ensure(names.is_empty(), || format!("the backend has changed the environment: {}", names.join(", ")))?;
    ensure(before.folder == after.folder, || {
        format!("the backend has changed the working directory to {:?}", after.folder)
    })?;
    ensure(before.umask == after.umask, || {
        format!(
            "the backend has changed the mode of new files: {:?} before, {:?} after",
            before.umask, after.umask
        )
    })?;
    ensure(before.signals == after.signals, || {
        format!(
            "the backend has changed signal handlers: {:?} before, {:?} after",
            before.signals, after.signals
        )
    })
}

/// The number of files that this process has open, where the system shows it.
fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Fails unless this thread computes as it does in any program: with subnormal numbers, and rounding to nearest.
fn arithmetic(when: &str) -> Outcome {
    let (one, half_ulp) = (black_box(1.0f32), black_box(f32::EPSILON * 0.5));
    let subnormal = black_box(f32::from_bits(1));
    ensure(black_box(f32::MIN_POSITIVE) * black_box(0.5) != 0.0, || {
        format!("the backend has the calling thread flush subnormal results {when}")
    })?;
    ensure(subnormal * black_box(2f32.powi(30)) != 0.0, || {
        format!("the backend has the calling thread take subnormal operands for zero {when}")
    })?;
    let nearest = one + half_ulp * 0.5 == 1.0
        && one + half_ulp * 1.5 == 1.0 + f32::EPSILON
        && -one - half_ulp * 0.5 == -1.0
        && -one - half_ulp * 1.5 == -1.0 - f32::EPSILON;
    ensure(nearest, || format!("the backend changes how the calling thread rounds {when}"))
}

/// Writes out what a backend has left in the buffers of C's standard output. The parent of a worker sees it.
fn flush_standard_output() {
    #[cfg(unix)]
    {
        unsafe extern "C" {
            fn fflush(stream: *mut std::ffi::c_void) -> std::ffi::c_int;
        }
        // SAFETY: a function of the C library; null means all streams.
        unsafe { fflush(std::ptr::null_mut()) };
    }
}
