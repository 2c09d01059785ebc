//! `dsrun bench abi`: measures the overhead of the C interface between a program and its plugins.
//!
//! The same backend runs linked in, through its own C interface (the loopback), and as a plugin. The three take turns, one step
//! of generation each.

use super::{median::median, prompts::token};
use crate::{
    arguments::Abi,
    commands::{print, print_json},
    devices::Devices,
    find_backend::registry,
    session::{engine_options, open_model},
    terminal::Terminal,
};
use anyhow::{Context, Result, bail};
use dsrun_core::device::{Backend, BackendInfo, Device, DeviceInfo, DeviceOptions};
use dsrun_engine::{Engine, EngineOptions, EnginePlan, Request, SamplingOptions};
use dsrun_models::model::Model;
use dsrun_plugin_sdk::{
    PluginBackend, backend_entry,
    discovery::{Origin, Places, discover},
};
use serde::Serialize;
use std::{path::Path, sync::Arc, time::Instant};

/// The results of a measurement.
#[derive(Debug, Serialize)]
struct Figures {
    model: String,
    backend: String,
    steps: usize,
    /// The first is the linked backend.
    ways: Vec<BackendFigures>,
}

/// The step times of the backend, linked or through an interface.
#[derive(Debug, Serialize)]
struct BackendFigures {
    name: String,
    /// Milliseconds per step.
    median: f64,
    least: f64,
    /// The first and third quartiles.
    quarter: f64,
    three_quarters: f64,
    /// The ratio to the median of the linked backend, minus one.
    overhead: f64,
    /// The ratio to the minimum of the linked backend, minus one.
    least_overhead: f64,
}

/// The default backend of this program as a type of its own, which exporting requires.
#[derive(Debug)]
struct Linked(Arc<dyn Backend>);

impl Linked {
    fn new() -> dsrun_core::Result<Self> {
        let registry = registry().map_err(|error| dsrun_core::Error::internal(format!("{error:#}")))?;
        registry.backend(None).map(|backend| Self(backend.clone()))
    }
}

impl Backend for Linked {
    fn info(&self) -> &BackendInfo {
        self.0.info()
    }

    fn devices(&self) -> dsrun_core::Result<Vec<DeviceInfo>> {
        self.0.devices()
    }

    fn open(&self, index: usize, options: &DeviceOptions) -> dsrun_core::Result<Arc<dyn Device>> {
        self.0.open(index, options)
    }
}

pub(crate) fn run(command: &Abi, terminal: &Terminal) -> Result<()> {
    let linked = Linked::new()?;
    let name = linked.info().name.clone();
    // SAFETY: the entry point belongs to a backend of this build.
    let loopback = unsafe { PluginBackend::from_entry(backend_entry!(Linked::new()?)) }?;
    let plugin = plugin(&name, command.plugin.as_deref(), terminal)?;
    let model = open_model(&command.model, command.engine.dtype, terminal)?;
    let device = DeviceOptions { threads: command.threads.map(usize::from), ..DeviceOptions::default() };
    let mut options = engine_options(&command.engine, 1, &Devices::one(linked.open(0, &device)?));
    options.ignore_end = true;
    // Without a prefix cache, every run computes its prompts.
    options.prefix_cache = false;
    // One more step warms up.
    let tokens = command.prompt + command.steps + 1;
    options.context = Some(options.context.unwrap_or(tokens));
    if options.context < Some(tokens) {
        bail!("--prompt and --steps together are {tokens} tokens, more than --context");
    }
    let mut engines: Vec<(&str, Engine)> = Vec::new();
    let backends: [(&str, Option<&dyn Backend>); 3] = [
        ("linked", Some(&linked)),
        ("loopback", Some(&loopback)),
        ("plugin", plugin.as_ref().map(|plugin| plugin as &dyn Backend)),
    ];
    for (name, backend) in backends {
        let Some(backend) = backend else { continue };
        terminal.note(&format!("loading: {name}"));
        engines.push((name, engine(&model, backend.open(0, &device)?, &options)?));
    }
    let mut times = vec![Vec::new(); engines.len()];
    for repeat in 0..command.repeat {
        terminal.note(&format!("run {} of {}", repeat + 1, command.repeat));
        run_once(&mut engines, command, model.config().vocabulary, &mut times)?;
    }
    let steps = times[0].len();
    let mut figures = Figures { model: model.name().to_owned(), backend: name, steps, ways: Vec::new() };
    for ((name, _), times) in engines.iter().zip(times) {
        let backend = BackendFigures::new(name, times, figures.ways.first());
        figures.ways.push(backend);
    }
    if command.json { print_json(&figures) } else { show(&figures) }
}

/// The same backend as a plugin: that of `file`, or the installed one. Without one, writes a note and returns `None`.
fn plugin(name: &str, file: Option<&Path>, terminal: &Terminal) -> Result<Option<PluginBackend>> {
    let plugin = match file {
        Some(file) => {
            let path =
                std::path::absolute(file).with_context(|| format!("{} is not a path", file.display()))?;
            let report = discover(&Places::of_process([path]));
            let found = report.plugins.iter().find(|plugin| plugin.origin == Origin::Argument);
            found.with_context(|| format!("there is no plugin {}", file.display()))?.load()?
        }
        None => {
            let report = discover(&Places::of_process([]));
            if !report.ready().any(|plugin| plugin.name == name) {
                terminal.note(&format!(
                    "no plugin `{name}` is installed, so only the loopback is measured; name a file with --plugin"
                ));
                return Ok(None);
            }
            report.load(name)?
        }
    };
    if plugin.info().name != name {
        bail!(
            "the plugin is `{}`, but the linked backend to compare it with is `{name}`",
            plugin.info().name
        );
    }
    Ok(Some(plugin))
}

fn engine(model: &Model, device: Arc<dyn Device>, options: &EngineOptions) -> Result<Engine> {
    let plan = EnginePlan::new(model, &*device, options)?;
    Ok(plan.load(model, device, &mut |_, _| {})?)
}

/// Generates from one prompt with every engine, one step each in turns, and adds the time of each step.
fn run_once(
    engines: &mut [(&str, Engine)],
    command: &Abi,
    vocabulary: usize,
    times: &mut [Vec<f64>],
) -> Result<()> {
    for (_, engine) in engines.iter_mut() {
        let prompt = (0..command.prompt).map(|index| token(index, vocabulary)).collect();
        let max_tokens = Some(command.steps + 1);
        engine.submit(Request {
            prompt,
            sampling: SamplingOptions::default(),
            max_tokens,
            ..Request::default()
        })?;
        // The prompt and the first step are not timed.
        while engine.step()?.is_empty() {}
    }
    for step in 0..command.steps {
        // The order rotates, because each engine finds the caches that the one before left.
        for turn in 0..engines.len() {
            let index = (step + turn) % engines.len();
            let start = Instant::now();
            engines[index].1.step()?;
            times[index].push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    for (name, engine) in engines.iter_mut() {
        if !engine.is_idle() {
            bail!("the {name} backend has not finished after {} steps", command.steps);
        }
    }
    Ok(())
}

impl BackendFigures {
    fn new(name: &str, mut times: Vec<f64>, linked: Option<&Self>) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |part: usize| times.get(times.len() * part / 4).copied().unwrap_or(f64::NAN);
        let (least, quarter, three_quarters) = (at(0), at(1), at(3));
        let median = median(times);
        Self {
            name: name.to_owned(),
            median,
            least,
            quarter,
            three_quarters,
            overhead: linked.map_or(0.0, |linked| median / linked.median - 1.0),
            least_overhead: linked.map_or(0.0, |linked| least / linked.least - 1.0),
        }
    }
}

fn show(figures: &Figures) -> Result<()> {
    print(&format!(
        "{} on {}, one token per step, {} steps each, in turns",
        figures.model, figures.backend, figures.steps
    ))?;
    for backend in &figures.ways {
        print(&format!(
            "{:<9} median {:.3} ms (quartiles {:.3} and {:.3}), minimum {:.3} ms; overhead {:+.2}% of the median, {:+.2}% \
             of the minimum",
            backend.name,
            backend.median,
            backend.quarter,
            backend.three_quarters,
            backend.least,
            backend.overhead * 100.0,
            backend.least_overhead * 100.0
        ))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overhead_is_relative_to_the_linked_backend() {
        let linked = BackendFigures::new("linked", vec![4.0, 1.0, 2.0, 3.0], None);
        assert_eq!((linked.median, linked.least, linked.overhead), (3.0, 1.0, 0.0));
        assert_eq!((linked.quarter, linked.three_quarters), (2.0, 4.0));
        let plugin = BackendFigures::new("plugin", vec![1.5, 6.0, 2.0], Some(&linked));
        assert_eq!((plugin.overhead, plugin.least_overhead), (2.0 / 3.0 - 1.0, 0.5));
    }
}
