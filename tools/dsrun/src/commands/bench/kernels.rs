//! `dsrun bench kernels`: measures the time of each distinct call of a step and compares it with its memory floor.

use super::bandwidth::read_bandwidth;
use crate::{
    arguments::BenchKernels,
    commands::{print, print_json},
    devices::open_only_device,
    session::{engine_options, load_plan, open_model},
    terminal::Terminal,
};
use anyhow::{Result, bail};
use dsrun_engine::{Bytes, CallFigures, EnginePlan};
use serde::Serialize;

/// The results of a measurement.
#[derive(Debug, Serialize)]
struct Figures {
    model: String,
    backend_device: String,
    dtype: String,
    batch: usize,
    past_tokens: usize,
    repeats: usize,
    read_bandwidth_bytes_per_second: f64,
    kernels: Vec<Kernel>,
    /// The number of calls of a step, repeated ones included.
    calls_per_step: usize,
    seconds_per_step: f64,
    floor_seconds_per_step: f64,
}

/// The figures of a distinct call.
#[derive(Debug, Serialize)]
struct Kernel {
    #[serde(flatten)]
    call: CallFigures,
    /// The time to move its bytes at the measured bandwidth.
    floor_seconds: f64,
    /// The floor over the time: 1 is as fast as memory.
    share_of_floor: f64,
}

pub(crate) fn run(command: &BenchKernels, terminal: &Terminal) -> Result<()> {
    let devices = open_only_device(&command.setup.devices, "bench kernels", terminal)?;
    let model = open_model(&command.setup.model, command.setup.engine.dtype, terminal)?;
    let device = devices.first().clone();
    let mut options = engine_options(&command.setup.engine, command.batch, &devices);
    options.ignore_end = true;
    options.context = Some(options.context.unwrap_or(command.past + 1));
    if options.context <= Some(command.past) {
        bail!("--past is {} tokens, which leaves no room in --context", command.past);
    }
    terminal.note("measuring the device's read bandwidth");
    let bandwidth = read_bandwidth(&*device)?;
    let plan = EnginePlan::new(&model, &*device, &options)?;
    let mut engine = load_plan(plan, &model, &devices, terminal)?;
    let kernel = |call: CallFigures| {
        let floor_seconds = call.bytes as f64 / bandwidth;
        Kernel { floor_seconds, share_of_floor: floor_seconds / call.seconds, call }
    };
    let calls = engine.time_calls(command.batch, command.past, command.measure.repeat)?;
    let kernels: Vec<Kernel> = calls.into_iter().map(kernel).collect();
    let all = |seconds: fn(&Kernel) -> f64| -> f64 {
        kernels.iter().map(|kernel| kernel.call.count as f64 * seconds(kernel)).sum()
    };
    let figures = Figures {
        model: model.name().to_owned(),
        backend_device: device.properties().name.clone(),
        dtype: format!("{:?}", command.setup.engine.dtype).to_lowercase(),
        batch: command.batch,
        past_tokens: command.past,
        repeats: command.measure.repeat,
        read_bandwidth_bytes_per_second: bandwidth,
        calls_per_step: kernels.iter().map(|kernel| kernel.call.count).sum(),
        seconds_per_step: all(|kernel| kernel.call.seconds),
        floor_seconds_per_step: all(|kernel| kernel.floor_seconds),
        kernels,
    };
    if command.measure.json { print_json(&figures) } else { show(&figures) }
}

fn show(figures: &Figures) -> Result<()> {
    print(&format!(
        "{} on {}, dtype {}: batch {}, {} past tokens each, median of {}, floor at {:.1} GB/s",
        figures.model,
        figures.backend_device,
        figures.dtype,
        figures.batch,
        figures.past_tokens,
        figures.repeats,
        figures.read_bandwidth_bytes_per_second / 1e9
    ))?;
    let names = figures.kernels.iter().map(|kernel| kernel.call.op.len()).max().unwrap_or(0).max(4);
    let places = figures.kernels.iter().map(|kernel| kernel.call.works_on.len()).max().unwrap_or(0).max(8);
    let columns = format!("{:>5} {:>10} {:>10} {:>10} {:>6}", "calls", "us", "bytes", "floor us", "share");
    print(&format!("{:names$}  {:places$}  {columns}", "call", "works on"))?;
    for kernel in &figures.kernels {
        let call = &kernel.call;
        print(&format!(
            "{:names$}  {:places$}  {:>5} {:>10.2} {:>10} {:>10.2} {:>5.0}%",
            call.op,
            call.works_on,
            call.count,
            call.seconds * 1e6,
            Bytes(call.bytes).to_string(),
            kernel.floor_seconds * 1e6,
            kernel.share_of_floor * 100.0
        ))?;
    }
    print(&format!(
        "a step: {} calls, {:.3} ms, floor {:.3} ms: {:.0}%",
        figures.calls_per_step,
        figures.seconds_per_step * 1e3,
        figures.floor_seconds_per_step * 1e3,
        figures.floor_seconds_per_step / figures.seconds_per_step * 100.0
    ))
}
