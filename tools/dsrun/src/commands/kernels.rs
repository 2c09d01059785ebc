//! `dsrun kernels build`: compiles the kernels of a model ahead of the first request.

use crate::{
    arguments::{Kernels, KernelsBuild, KernelsCommand},
    devices::{Devices, open_only_device},
    session::{build_kernels, describe_device, engine_options, open_draft, open_model, plan_engine},
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
    let devices = match &command.absent {
        Some(name) => Devices::one(describe_device(&command.setup.devices.device, name)?),
        None => open_only_device(&command.setup.devices, "kernels build", terminal)?,
    };
    let model = open_model(&command.setup.model, command.setup.engine.dtype, terminal)?;
    let draft = open_draft(
        &command.speculation,
        &command.setup.model,
        command.setup.engine.dtype,
        &devices,
        terminal,
    )?;
    let speculation = command.speculation.speculation();
    let options =
        EngineOptions { speculation, ..engine_options(&command.setup.engine, command.batch, &devices) };
    let plan = plan_engine(&model, draft.as_ref(), &devices, &options)?;
    let started = Instant::now();
    let calls = build_kernels(&plan, &**devices.first(), command.jobs, terminal)?;
    let (seconds, device) = (started.elapsed().as_secs_f64(), devices.name(1));
    let ready = if command.absent.is_some() { "built for" } else { "ready on" };
    terminal
        .note(&format!("the kernels of {calls} distinct calls are {ready} {device} after {seconds:.1} s"));
    Ok(())
}
