//! `dsrun kernels build`: what a backend builds for a model, built ahead of the first request.

use crate::{
    arguments::{Kernels, KernelsBuild, KernelsCommand},
    session::{engine_options, open_device, open_draft, open_model, plan_engine},
    terminal::Terminal,
};
use anyhow::Result;
use dsrun_engine::EngineOptions;
use std::{thread::available_parallelism, time::Instant};

pub(crate) fn run(command: &Kernels, terminal: &Terminal) -> Result<()> {
    let KernelsCommand::Build(command) = &command.command;
    build(command, terminal)
}

/// Plans every call of every step that the engine would run. A backend that keeps what it builds has it then.
fn build(command: &KernelsBuild, terminal: &Terminal) -> Result<()> {
    let device = open_device(&command.device)?;
    let model = open_model(&command.model, command.engine.dtype, terminal)?;
    let draft = open_draft(&command.speculation, &command.model, command.engine.dtype, terminal)?;
    let speculation = command.speculation.speculation();
    let options = EngineOptions { speculation, ..engine_options(&command.engine, command.batch) };
    let plan = plan_engine(&model, draft.as_ref(), &*device, &options)?;
    let processors = || available_parallelism().map_or(1, usize::from);
    let jobs = command.jobs.unwrap_or_else(processors);
    let started = Instant::now();
    let bar = terminal.counter("building kernels");
    let calls = plan.prepare(&*device, jobs, &|done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    let seconds = started.elapsed().as_secs_f64();
    let (calls, device) = (calls?, &device.properties().name);
    terminal.note(&format!("{calls} kinds of call are ready on {device} after {seconds:.1} s"));
    Ok(())
}
