//! `dsrun kernels build`: compiles the kernels of a model ahead of the first request.

use crate::{
    arguments::{Kernels, KernelsBuild, KernelsCommand},
    session::{
        build_kernels, describe_device, engine_options, open_device, open_draft, open_model, plan_engine,
    },
    terminal::Terminal,
};
use anyhow::Result;
use dsrun_engine::EngineOptions;
use std::time::Instant;

pub(crate) fn run(command: &Kernels, terminal: &Terminal) -> Result<()> {
    let KernelsCommand::Build(command) = &command.command;
    build(command, terminal)
}

/// Plans every call of every step that the engine would run, so that the backend compiles and caches its kernels.
fn build(command: &KernelsBuild, terminal: &Terminal) -> Result<()> {
    let device = match &command.absent {
        Some(name) => describe_device(&command.setup.device, name)?,
        None => open_device(&command.setup.device)?,
    };
    let model = open_model(&command.setup.model, command.setup.engine.dtype, terminal)?;
    let draft = open_draft(&command.speculation, &command.setup.model, command.setup.engine.dtype, terminal)?;
    let speculation = command.speculation.speculation();
    let options = EngineOptions { speculation, ..engine_options(&command.setup.engine, command.batch) };
    let plan = plan_engine(&model, draft.as_ref(), &*device, &options)?;
    let started = Instant::now();
    let calls = build_kernels(&plan, &*device, command.jobs, terminal)?;
    let (seconds, device) = (started.elapsed().as_secs_f64(), &device.properties().name);
    let ready = if command.absent.is_some() { "built for" } else { "ready on" };
    terminal
        .note(&format!("the kernels of {calls} distinct calls are {ready} {device} after {seconds:.1} s"));
    Ok(())
}
