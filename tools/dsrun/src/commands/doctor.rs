//! `dsrun doctor`: checks the backends of this machine.
//!
//! Unlike `dsrun backends`, it opens every device and runs a computation on it. Plugins that are not named on the command
//! line run in processes of their own, so that a crash of one does not end the report.

mod links;

use super::{print, print_json};
use crate::{
    arguments::Doctor,
    find_backend::{find_backend, registry},
    probe,
};
use anyhow::{Context, Result, bail, ensure};
use dsrun_core::{
    DType, TensorDesc,
    checked::CheckedPlan,
    device::{Backend, BufferSlice, DeviceInfo, DeviceOptions, MemoryKind, MemoryUse},
    kernels::{Argument, Arguments, Binding, CallDesc, OperandDesc},
    op::Add,
};
use dsrun_engine::Bytes;
use dsrun_models::fetch::{FetchOptions, list_cached};
use dsrun_plugin_sdk::discovery::{Places, Plugin, State, discover};
use serde::{Deserialize, Serialize};
use std::{process::Command, time::Duration};

/// The time limit for the first result of a device, which may have to compile kernels.
const FIRST_RESULT: Duration = Duration::from_secs(60);
/// The time limit for all devices of a plugin.
const PLUGIN: Duration = Duration::from_secs(180);

/// The report on the machine.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    version: String,
    platform: String,
    cache: Cache,
    backends: Vec<BackendReport>,
    /// The results of data exchange between devices, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    links: Option<links::Links>,
    /// Whether the named backend, or the default without a name, works.
    ok: bool,
}

/// The cache of fetched models.
#[derive(Debug, Serialize, Deserialize)]
struct Cache {
    path: String,
    models: usize,
    bytes: u64,
    error: Option<String>,
}

/// The report on a backend.
#[derive(Debug, Serialize, Deserialize)]
struct BackendReport {
    name: String,
    version: String,
    /// `linked`, or the plugin's file.
    source: String,
    default: bool,
    works: bool,
    /// The reason why the backend cannot be used at all.
    error: Option<String>,
    devices: Vec<DeviceReport>,
    findings: Vec<Finding>,
}

/// The report on a device.
#[derive(Debug, Serialize, Deserialize)]
struct DeviceReport {
    index: usize,
    name: String,
    memory_bytes: Option<u64>,
    free_bytes: Option<u64>,
    /// The reason why the computation failed.
    error: Option<String>,
}

/// A dependency of a backend, such as a driver library, and its state.
#[derive(Debug, Serialize, Deserialize)]
struct Finding {
    subject: String,
    present: bool,
    detail: String,
}

pub(crate) fn run(command: &Doctor) -> Result<()> {
    let backends = match &command.backend {
        Some(name) => vec![report_on(name)],
        None => all()?,
    };
    let ok = match &command.backend {
        Some(_) => backends.iter().all(|backend| backend.works),
        None => backends.iter().any(|backend| backend.default && backend.works),
    };
    let examine_links = |devices: &String| -> Result<links::Links> {
        links::examine(&*find_backend(command.backend.as_deref())?, devices)
    };
    let links = command.devices.as_ref().map(examine_links).transpose()?;
    let linked = links.as_ref().is_none_or(links::Links::work);
    let report = Report {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        cache: cache(),
        backends,
        links,
        ok,
    };
    if command.json {
        print_json(&report)?;
    } else {
        show(&report)?;
    }
    match &command.backend {
        _ if ok && !linked => bail!("data was lost or changed between devices"),
        _ if ok => Ok(()),
        Some(name) => bail!("backend {name} does not work on this machine"),
        None => bail!("the default backend does not work on this machine"),
    }
}

/// Reports on the linked backends and all discovered plugins.
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

/// Reports on the backend of a name or file.
fn report_on(name: &str) -> BackendReport {
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

/// Reports on a plugin from another process of this program.
fn in_own_process(plugin: &Plugin) -> Result<BackendReport> {
    let program = std::env::current_exe().context("the path of this program is unknown")?;
    let mut command = Command::new(program);
    command.args(["doctor", "--json", "--quiet", "--backend"]).arg(plugin.file());
    let ended = probe::run(command, PLUGIN)?;
    // The plugin may print lines before and after the report.
    let start = ended.output.find("{\n").unwrap_or(0);
    let mut reports = serde_json::Deserializer::from_str(&ended.output[start..]).into_iter::<Report>();
    let report = reports.next().and_then(std::result::Result::ok);
    let report = report
        .with_context(|| format!("the process that loaded it ended without a report: {}", ended.status))?;
    let report =
        report.backends.into_iter().next().context("the report of the process that loaded it is empty")?;
    // The report on a plugin that cannot be loaded lacks its name.
    Ok(BackendReport { name: plugin.name.clone(), ..report })
}

/// Reports on a backend, and runs a computation on each of its devices.
fn examine(backend: &dyn Backend, source: &str, default: bool) -> BackendReport {
    let info = backend.info();
    let (devices, error) = match backend.devices() {
        Ok(devices) if devices.is_empty() => (devices, Some("no devices on this machine".to_owned())),
        Ok(devices) => (devices, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let devices: Vec<DeviceReport> =
        devices.into_iter().map(|device| examine_device(backend, device)).collect();
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

/// Reports on a device.
fn examine_device(backend: &dyn Backend, device: DeviceInfo) -> DeviceReport {
    let (free_bytes, error) = match compute(backend, device.index) {
        Ok(memory) => (memory.free, None),
        Err(error) => (None, Some(format!("{error:#}"))),
    };
    let DeviceInfo { index, name, memory_bytes } = device;
    DeviceReport { index, name, memory_bytes, free_bytes, error }
}

/// Adds numbers on a device, checks the sums, and returns the memory use before.
fn compute(backend: &dyn Backend, index: usize) -> Result<MemoryUse> {
    const NUMBERS: [f32; 4] = [1.5, -0.25, 0.0, 1e9];
    let device = backend.open(index, &DeviceOptions::default())?;
    let free = device.memory();
    let tensor = TensorDesc::dense(DType::F32, &[1, NUMBERS.len()]);
    let operand = || Some(OperandDesc::Tensor(tensor.clone()));
    let sum = CallDesc {
        op: Add { alpha: 2.0 }.into(),
        operands: vec![operand(), operand(), None, None],
        results: vec![tensor.clone()],
        comm: None,
    };
    let plan = CheckedPlan::new(&*device, sum.validate()?)?;
    let allocate = |bytes: usize| -> Result<BufferSlice> {
        Ok(BufferSlice::whole(device.allocate(bytes, MemoryKind::Device)?))
    };
    let bytes = NUMBERS.map(f32::to_le_bytes).concat();
    let (x, y) = (allocate(bytes.len())?, allocate(bytes.len())?);
    let workspace = (plan.workspace_bytes() > 0).then(|| allocate(plan.workspace_bytes())).transpose()?;
    let mut stream = device.stream()?;
    stream.upload(&bytes, &x)?;
    let argument = || Some(Argument::Tensor(Binding::new(x.clone())));
    let call = plan.bind(&Arguments {
        operands: vec![argument(), argument(), None, None],
        results: vec![Binding::new(y.clone())],
        workspace,
    })?;
    call.enqueue(&mut *stream)?;
    let mut found = vec![0; bytes.len()];
    stream.download(&y, &mut found, "a first result", FIRST_RESULT)?;
    // Three times a number of few bits is exact.
    let expected = NUMBERS.map(|number| (3.0 * number).to_le_bytes()).concat();
    ensure!(found == expected, "the device computed wrong values: bytes {found:?}, must be {expected:?}");
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
    report.backends.iter().try_for_each(show_backend)?;
    let lines = report.links.iter().flat_map(links::Links::lines);
    lines.into_iter().try_for_each(|line| print(&line))
}

fn show_backend(backend: &BackendReport) -> Result<()> {
    let BackendReport { name, version, source, default, works, error, devices, findings } = backend;
    let heading = [name, version].map(String::as_str).join(" ");
    let source = if source.is_empty() { String::new() } else { format!(", {source}") };
    let default = if *default { ", the default" } else { "" };
    let verdict = if *works { "works" } else { "does not work" };
    print(&format!("\n{}{source}{default}: {verdict}", heading.trim_end()))?;
    // An error that repeats a finding is not shown twice.
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
