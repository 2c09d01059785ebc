//! `dsrun bench all-reduce`: measures all-reduces over several devices, for tensors of several sizes, or [compares](replays) them.
//!
//! A measurement is one launch of several all-reduces in a row, as in a step of a model. Its time is that of the rank that came last: the
//! others waited for it in their first one.

mod replays;

use super::median::median;
use crate::{
    arguments::{BenchAllReduce, DevicesArguments, Dtype},
    commands::{print, print_json},
    devices::open_devices,
    group::{LIMIT, Rank, on_ranks},
    terminal::Terminal,
};
use anyhow::{Context, Result, bail, ensure};
use dsrun_core::{
    DType, TensorDesc,
    device::Device,
    graph::{CallList, Graph},
    op::{AllReduce, MeshAxis, Reduction},
};
use dsrun_engine::Bytes;
use serde::Serialize;
use std::{sync::Arc, time::Instant};

/// All-reduces of one launch.
const CALLS: usize = 20;

/// The results of a measurement.
#[derive(Debug, Serialize)]
struct Figures {
    ranks: usize,
    backend_device: String,
    dtype: String,
    repeats: usize,
    sizes: Vec<Size>,
}

/// The figures of one size.
#[derive(Debug, Serialize)]
struct Size {
    /// Bytes of each rank.
    bytes: usize,
    microseconds: f64,
    /// The bytes that each rank sends at least, over the time: what a link carries.
    bus_bytes_per_second: f64,
}

/// All-reduces of one size whose results were right.
#[derive(Debug, Serialize)]
struct Checked {
    bytes: usize,
    all_reduces: u64,
    seconds: f64,
}

pub(crate) fn run(command: &BenchAllReduce, terminal: &Terminal) -> Result<()> {
    let dtype = match command.dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::Bf16 => DType::BF16,
        Dtype::Keep => {
            bail!(
                "--dtype keep means the types of a model, and there is none here\nhint: choose f32, f16 or bf16"
            )
        }
    };
    check(&command.devices)?;
    let devices = open_devices(&command.devices, terminal)?;
    if devices.processes().is_some() {
        bail!("bench all-reduce runs in one process\nhint: start one, with --launcher none");
    }
    let ranks = devices.ranks();
    ensure!(
        ranks.len() > 1,
        "bench all-reduce needs several devices, but this is one\nhint: choose them with --tp or --devices"
    );
    let lengths: Vec<usize> =
        command.size.iter().map(|size| usize::try_from(size.0).unwrap_or(usize::MAX)).collect();
    for bytes in &lengths {
        ensure!(
            bytes.is_multiple_of(dtype.bytes()),
            "--size {bytes} is not a whole number of elements of {dtype}, which have {} bytes",
            dtype.bytes()
        );
    }
    if let Some(count) = command.check {
        let mut checked = Vec::new();
        for bytes in lengths {
            let what = format!("all-reduces of {}", Bytes(bytes as u64));
            let (bar, start) = (terminal.counter(&what), Instant::now());
            let all_reduces = replays::check(ranks, bytes, dtype, count as u64, &bar).context(what)?;
            bar.finish_and_clear();
            let seconds = start.elapsed().as_secs_f64();
            if !command.measure.json {
                print(&format!(
                    "{all_reduces} all-reduces of {bytes} bytes: the right bits on all {} ranks, {seconds:.1} s",
                    ranks.len()
                ))?;
            }
            checked.push(Checked { bytes, all_reduces, seconds });
        }
        return if command.measure.json { print_json(&checked) } else { Ok(()) };
    }
    let mut sizes = Vec::new();
    for bytes in lengths {
        terminal.note(&format!("measuring {}", Bytes(bytes as u64)));
        let seconds = measure(ranks, bytes, dtype, command.measure.repeat)
            .with_context(|| format!("all-reduces of {bytes} bytes"))?;
        // In a ring, each rank sends (and receives) every part but one, twice.
        let sent = 2.0 * bytes as f64 * (ranks.len() - 1) as f64 / ranks.len() as f64;
        sizes.push(Size { bytes, microseconds: seconds * 1e6, bus_bytes_per_second: sent / seconds });
    }
    let figures = Figures {
        ranks: ranks.len(),
        backend_device: devices.first().properties().name.clone(),
        dtype: dtype.name().to_owned(),
        repeats: command.measure.repeat,
        sizes,
    };
    if command.measure.json { print_json(&figures) } else { show(&figures) }
}

/// Refuses options about a model's stages, weights and answers, which have no effect here.
fn check(devices: &DevicesArguments) -> Result<()> {
    let given = [
        ("--pp", devices.pipeline_stages() > 1),
        ("--stages", !devices.stages.is_empty()),
        ("--micro-batches", devices.micro_batches.is_some()),
        ("--shard", devices.shard.is_some()),
        ("--batch-invariant", devices.batch_invariant),
    ];
    match given.iter().find(|(_, given)| *given) {
        Some((flag, _)) => bail!("{flag} has no effect on bench all-reduce\nhint: leave it out"),
        None => Ok(()),
    }
}

/// The median time in seconds of an all-reduce of so many bytes.
fn measure(devices: &[Arc<dyn Device>], bytes: usize, dtype: DType, repeats: usize) -> Result<f64> {
    let tensor = TensorDesc::dense(dtype, &[1, bytes / dtype.bytes()]);
    let of_ranks = on_ranks(devices, &tensor, |rank| times(rank, repeats))?;
    let last = |repeat: usize| of_ranks.iter().map(|times| times[repeat]).fold(f64::INFINITY, f64::min);
    Ok(median((0..repeats).map(last).collect()) / CALLS as f64)
}

/// The time in seconds of each launch.
fn times(rank: &mut Rank, repeats: usize) -> Result<Vec<f64>> {
    // The result replaces the operand. A maximum moves the bytes of a sum, and does not grow.
    rank.stream.fill(&rank.memory, 0x11)?;
    let op = AllReduce { axis: MeshAxis::Tensor, reduction: Reduction::Max };
    let calls = (0..CALLS).map(|_| rank.bind(op, true)).collect::<Result<_>>()?;
    let graph: Box<dyn Graph> = match rank.device.graphs() {
        Some(graphs) => graphs.capture(&mut *rank.stream, calls)?,
        None => Box::new(CallList::new(calls)),
    };
    let (begin, end) = (rank.device.event()?, rank.device.event()?);
    graph.launch(&mut *rank.stream)?;
    let mut seconds = Vec::new();
    for _ in 0..repeats {
        rank.wait("all-reduces")?;
        let start = Instant::now();
        rank.stream.record(&*begin)?;
        graph.launch(&mut *rank.stream)?;
        rank.stream.record(&*end)?;
        end.synchronize("all-reduces", LIMIT)?;
        let elapsed = end.elapsed_since(&*begin)?.unwrap_or_else(|| start.elapsed());
        seconds.push(elapsed.as_secs_f64());
    }
    rank.comm.status()?;
    Ok(seconds)
}

fn show(figures: &Figures) -> Result<()> {
    print(&format!(
        "all-reduce on {} ranks of {}, {}: median of {} launches of {CALLS} each",
        figures.ranks, figures.backend_device, figures.dtype, figures.repeats
    ))?;
    print(&format!("{:>10} {:>10} {:>12}", "bytes", "us", "bus GB/s"))?;
    for size in &figures.sizes {
        let bandwidth = size.bus_bytes_per_second / 1e9;
        print(&format!("{:>10} {:>10.1} {bandwidth:>12.1}", size.bytes, size.microseconds))?;
    }
    Ok(())
}
