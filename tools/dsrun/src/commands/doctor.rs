//! `dsrun doctor`: what this machine and each backend offer, and whether they work.
//!
//! Unlike `dsrun backends` this runs code: every device is opened and computes something. Plugins that were not asked for by
//! name do so in a process of their own, so that one that crashes spoils nothing.

use super::{print, print_json};
use crate::{arguments::Doctor, find_backend::find_backend, probe, session::registry};
use anyhow::{Context, Result, bail, ensure};
use dsrun_core::{
    DType, TensorDesc,
    checked::CheckedPlan,
    device::{Backend, BufferSlice, DeviceInfo, DeviceOptions, MemoryKind, MemoryUse},
    discovery::{Places, Plugin, State, discover},
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc},
    op::Fill,
};
use dsrun_engine::Bytes;
use dsrun_models::fetch::{FetchOptions, list_cached};
use serde::{Deserialize, Serialize};
use std::{process::Command, time::Duration};

/// How long a device may take for a first result: it may have kernels to build.
const FIRST_RESULT: Duration = Duration::from_secs(60);
/// How long a plugin may take for all of its devices.
const PLUGIN: Duration = Duration::from_secs(180);

/// Everything that is found.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    version: String,
    platform: String,
    cache: Cache,
    backends: Vec<BackendReport>,
    /// Whether the backend that was asked for, or else the default, works.
    ok: bool,
}

/// Fetched models.
#[derive(Debug, Serialize, Deserialize)]
struct Cache {
    path: String,
    models: usize,
    bytes: u64,
    error: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct BackendReport {
    name: String,
    version: String,
    /// `linked`, or the plugin's file.
    source: String,
    default: bool,
    works: bool,
    /// Why it cannot be used at all.
    error: Option<String>,
    devices: Vec<DeviceReport>,
    findings: Vec<Finding>,
}

#[derive(Debug, Serialize, Deserialize)]
struct DeviceReport {
    index: usize,
    name: String,
    memory_bytes: Option<u64>,
    free_bytes: Option<u64>,
    /// Why it does not compute.
    error: Option<String>,
}

/// What a backend says of something it uses.
#[derive(Debug, Serialize, Deserialize)]
struct Finding {
    subject: String,
    present: bool,
    detail: String,
}

pub(crate) fn run(command: &Doctor) -> Result<()> {
    let backends = match &command.backend {
        Some(name) => vec![asked_for(name)],
        None => all()?,
    };
    let ok = match &command.backend {
        Some(_) => backends.iter().all(|backend| backend.works),
        None => backends.iter().any(|backend| backend.default && backend.works),
    };
    let report = Report {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        cache: cache(),
        backends,
        ok,
    };
    if command.json {
        print_json(&report)?;
    } else {
        show(&report)?;
    }
    match &command.backend {
        _ if ok => Ok(()),
        Some(name) => bail!("backend {name} does not work on this machine"),
        None => bail!("the default backend does not work on this machine"),
    }
}

/// The backends that are linked in, and all plugins that are found.
fn all() -> Result<Vec<BackendReport>> {
    let registry = registry()?;
    let linked = registry.backends().iter().enumerate();
    let mut reports: Vec<BackendReport> =
        linked.map(|(index, backend)| examine(&**backend, "linked", index == 0)).collect();
    for plugin in discover(&Places::of_process([])).plugins {
        let report = match &plugin.state {
            State::Ready => in_own_process(&plugin),
            State::Shadowed(_) | State::Broken(_) => {
                Err(anyhow::anyhow!("{}", plugin.problem().unwrap_or_default()))
            }
        };
        reports.push(report.unwrap_or_else(|error| unusable(&plugin, &error)));
    }
    Ok(reports)
}

/// The backend of a name or file.
fn asked_for(name: &str) -> BackendReport {
    match find_backend(Some(name)) {
        Ok(backend) => {
            let source = if name.contains(std::path::is_separator) { name } else { "" };
            examine(&*backend, source, false)
        }
        Err(error) => BackendReport { error: Some(format!("{error:#}")), ..empty(name, "") },
    }
}

fn empty(name: &str, source: &str) -> BackendReport {
    BackendReport {
        name: name.to_owned(),
        version: String::new(),
        source: source.to_owned(),
        default: false,
        works: false,
        error: None,
        devices: Vec::new(),
        findings: Vec::new(),
    }
}

fn unusable(plugin: &Plugin, error: &anyhow::Error) -> BackendReport {
    let source = plugin.file().display().to_string();
    BackendReport { error: Some(format!("{error:#}")), ..empty(&plugin.name, &source) }
}

/// Has another process of this program look at a plugin.
fn in_own_process(plugin: &Plugin) -> Result<BackendReport> {
    let program = std::env::current_exe().context("this program does not know its own file")?;
    let mut command = Command::new(program);
    command.args(["doctor", "--json", "--quiet", "--backend"]).arg(plugin.file());
    let ended = probe::run(command, PLUGIN)?;
    // What the plugin prints may be around the report.
    let start = ended.output.find("{\n").unwrap_or(0);
    let mut reports = serde_json::Deserializer::from_str(&ended.output[start..]).into_iter::<Report>();
    let report = reports.next().and_then(std::result::Result::ok);
    let report = report.with_context(|| format!("its process ended without a report: {}", ended.status))?;
    let report = report.backends.into_iter().next().context("its process reported nothing")?;
    // One that cannot be loaded does not know its own name.
    Ok(BackendReport { name: plugin.name.clone(), ..report })
}

/// Everything about a backend, each device tried.
fn examine(backend: &dyn Backend, source: &str, default: bool) -> BackendReport {
    let info = backend.info();
    let (devices, error) = match backend.devices() {
        Ok(devices) if devices.is_empty() => (devices, Some("it has no devices here".to_owned())),
        Ok(devices) => (devices, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let devices: Vec<DeviceReport> = devices.into_iter().map(|device| tried(backend, device)).collect();
    let found = |finding: dsrun_core::device::Finding| Finding {
        subject: finding.subject,
        present: finding.present,
        detail: finding.detail,
    };
    BackendReport {
        version: info.version.clone(),
        default,
        works: error.is_none() && devices.iter().all(|device| device.error.is_none()),
        error,
        devices,
        findings: backend.diagnose().into_iter().map(found).collect(),
        ..empty(&info.name, source)
    }
}

fn tried(backend: &dyn Backend, device: DeviceInfo) -> DeviceReport {
    let (free_bytes, error) = match compute(backend, device.index) {
        Ok(memory) => (memory.free, None),
        Err(error) => (None, Some(format!("{error:#}"))),
    };
    let DeviceInfo { index, name, memory_bytes } = device;
    DeviceReport { index, name, memory_bytes, free_bytes, error }
}

/// Has a device fill a few numbers, and looks at them.
fn compute(backend: &dyn Backend, index: usize) -> Result<MemoryUse> {
    const NUMBERS: usize = 4;
    let device = backend.open(index, &DeviceOptions::default())?;
    let free = device.memory();
    let tensor = TensorDesc::dense(DType::F32, &[1, NUMBERS]);
    let plan = CheckedPlan::new(
        &*device,
        CallDesc {
            op: Fill { value: 1.5 }.into(),
            operands: vec![Some(OperandDesc::Tensor(tensor.clone()))],
            results: vec![tensor],
            comm: None,
        },
    )?;
    let allocate = |bytes: usize| Ok(BufferSlice::whole(device.allocate(bytes, MemoryKind::Device)?));
    let numbers: BufferSlice = (allocate(NUMBERS * 4) as Result<_>)?;
    let workspace = (plan.workspace_bytes() > 0).then(|| allocate(plan.workspace_bytes())).transpose()?;
    let binding = Binding::new(numbers.clone());
    let call = plan.bind(&Arguments {
        operands: vec![Some(Argument::Tensor(binding.clone()))],
        results: vec![binding],
        workspace,
    })?;
    let mut stream = device.stream()?;
    call.enqueue(&mut *stream)?;
    let mut bytes = [0; NUMBERS * 4];
    stream.download(&numbers, &mut bytes, "a first result", FIRST_RESULT)?;
    ensure!(bytes == [1.5f32.to_le_bytes(); NUMBERS].as_flattened(), "it computes the wrong numbers");
    Ok(free)
}

fn cache() -> Cache {
    let found = FetchOptions::from_env().and_then(|options| {
        let models = list_cached(&options)?;
        let bytes = models.iter().map(|model| model.bytes).sum();
        Ok(Cache { path: options.cache.display().to_string(), models: models.len(), bytes, error: None })
    });
    found.unwrap_or_else(|error| Cache {
        path: String::new(),
        models: 0,
        bytes: 0,
        error: Some(error.to_string()),
    })
}

fn show(report: &Report) -> Result<()> {
    print(&format!("dsrun {} on {}", report.version, report.platform))?;
    let Cache { path, models, bytes, error } = &report.cache;
    match error {
        Some(error) => print(&format!("cache: {error}"))?,
        None => {
            let plural = if *models == 1 { "" } else { "s" };
            print(&format!("cache: {models} model{plural}, {} in {path}", Bytes(*bytes)))?;
        }
    }
    report.backends.iter().try_for_each(show_backend)
}

fn show_backend(backend: &BackendReport) -> Result<()> {
    let BackendReport { name, version, source, default, works, error, devices, findings } = backend;
    let heading = [name, version].map(String::as_str).join(" ");
    let source = if source.is_empty() { String::new() } else { format!(", {source}") };
    let default = if *default { ", the default" } else { "" };
    let verdict = if *works { "works" } else { "does not work" };
    print(&format!("\n{}{source}{default}: {verdict}", heading.trim_end()))?;
    // What a finding says as well need not be said twice.
    let said = |error: &str| findings.iter().any(|finding| error.starts_with(&finding.detail));
    if let Some(error) = error.as_ref().filter(|error| !said(error)) {
        print(&format!("  {error}"))?;
    }
    for device in devices {
        let bytes = |what: &str, bytes: Option<u64>| {
            bytes.map(|bytes| format!(", {}{what}", Bytes(bytes))).unwrap_or_default()
        };
        let memory = bytes("", device.memory_bytes) + &bytes(" free", device.free_bytes);
        let verdict = device.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
        print(&format!("  device {}: {}{memory}{verdict}", device.index, device.name))?;
    }
    let width = findings.iter().map(|finding| finding.subject.len()).max().unwrap_or(0);
    for Finding { subject, present, detail } in findings {
        let mark = if *present { "+" } else { "-" };
        print(&format!("  {mark} {subject:width$}  {detail}"))?;
    }
    Ok(())
}
