//! `dsrun bench abi`: what the C tables between a program and its plugins cost. The same backend is reached in three ways, linked
//! in, through its own C tables (the loopback), and as a plugin, and each takes its turn with every step of generation.

use super::{median, token};
use crate::{
    arguments::Abi,
    commands::{print, print_json},
    session::{engine_options, open_model, registry},
    terminal::Terminal,
};
use anyhow::{Context, Result, bail};
use dsrun_core::{
    abi::PluginBackend,
    backend_entry,
    device::{Backend, BackendInfo, Device, DeviceInfo, DeviceOptions},
    discovery::{Origin, Places, discover},
};
use dsrun_engine::{Engine, EngineOptions, EnginePlan, Request, SamplingOptions};
use dsrun_models::model::Model;
use serde::Serialize;
use std::{path::Path, sync::Arc, time::Instant};

/// What was measured.
#[derive(Debug, Serialize)]
struct Figures {
    model: String,
    backend: String,
    steps: usize,
    /// The first is linked in.
    ways: Vec<Way>,
}

/// A way to reach the backend.
#[derive(Debug, Serialize)]
struct Way {
    name: String,
    /// Milliseconds per step.
    median: f64,
    least: f64,
    /// A quarter of all steps were faster, a quarter slower.
    quarter: f64,
    three_quarters: f64,
    /// The median over the linked one's, less one.
    overhead: f64,
    /// The least over the linked one's, less one.
    least_overhead: f64,
}

/// The default backend of this program, as a type of its own: what is exported has to be one.
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
    // SAFETY: the entry is that of a backend of this very build.
    let loopback = unsafe { PluginBackend::from_entry(backend_entry!(Linked::new()?)) }?;
    let plugin = plugin(&name, command.plugin.as_deref(), terminal)?;
    let model = open_model(&command.model, command.engine.dtype, terminal)?;
    let mut options = engine_options(&command.engine, 1);
    options.ignore_end = true;
    // Every run computes its prompts.
    options.prefix_cache = false;
    // One step warms up.
    let tokens = command.prompt + command.steps + 1;
    options.context = Some(options.context.unwrap_or(tokens));
    if options.context < Some(tokens) {
        bail!("--prompt and --steps together are {tokens} tokens, more than --context");
    }
    let device = DeviceOptions { threads: command.threads.map(usize::from), ..DeviceOptions::default() };
    let mut ways: Vec<(&str, Engine)> = Vec::new();
    let backends: [(&str, Option<&dyn Backend>); 3] = [
        ("linked", Some(&linked)),
        ("loopback", Some(&loopback)),
        ("plugin", plugin.as_ref().map(|plugin| plugin as &dyn Backend)),
    ];
    for (way, backend) in backends {
        let Some(backend) = backend else { continue };
        terminal.note(&format!("loading: {way}"));
        ways.push((way, engine(&model, backend.open(0, &device)?, &options)?));
    }
    let mut times = vec![Vec::new(); ways.len()];
    for repeat in 0..command.repeat {
        terminal.note(&format!("run {} of {}", repeat + 1, command.repeat));
        run_once(&mut ways, command, model.config().vocabulary, &mut times)?;
    }
    let steps = times[0].len();
    let mut figures = Figures { model: model.name().to_owned(), backend: name, steps, ways: Vec::new() };
    for ((way, _), times) in ways.iter().zip(times) {
        let way = Way::new(way, times, figures.ways.first());
        figures.ways.push(way);
    }
    if command.json { print_json(&figures) } else { show(&figures) }
}

/// The same backend as a plugin: the one that was asked for, or the one that is installed. `None`, with a note, without one.
fn plugin(name: &str, file: Option<&Path>, terminal: &Terminal) -> Result<Option<PluginBackend>> {
    let plugin = match file {
        Some(file) => {
            let path = std::path::absolute(file).with_context(|| format!("{} is no path", file.display()))?;
            let report = discover(&Places::of_process([path]));
            let found = report.plugins.iter().find(|plugin| plugin.origin == Origin::Argument);
            found.with_context(|| format!("there is no plugin {}", file.display()))?.load()?
        }
        None => {
            let report = discover(&Places::of_process([]));
            if !report.ready().any(|plugin| plugin.name == name) {
                terminal.note(&format!(
                    "no plugin `{name}` is installed, so only the loopback is measured (--plugin names a file)"
                ));
                return Ok(None);
            }
            report.load(name)?
        }
    };
    if plugin.info().name != name {
        bail!("the plugin is `{}`, but the backend to compare it with is `{name}`", plugin.info().name);
    }
    Ok(Some(plugin))
}

fn engine(model: &Model, device: Arc<dyn Device>, options: &EngineOptions) -> Result<Engine> {
    let plan = EnginePlan::new(model, &*device, options)?;
    Ok(plan.load(model, device, &mut |_, _| {})?)
}

/// Generates from one prompt with every engine, step by step in turns, and adds the time of each step.
fn run_once(
    ways: &mut [(&str, Engine)],
    command: &Abi,
    vocabulary: usize,
    times: &mut [Vec<f64>],
) -> Result<()> {
    for (_, engine) in ways.iter_mut() {
        let prompt = (0..command.prompt).map(|index| token(index, vocabulary)).collect();
        let max_tokens = Some(command.steps + 1);
        engine.submit(Request {
            prompt,
            sampling: SamplingOptions::default(),
            max_tokens,
            ..Request::default()
        })?;
        // The prompt, and a first step.
        while engine.step()?.is_empty() {}
    }
    for step in 0..command.steps {
        // Whoever is first finds other caches than whoever is last.
        for turn in 0..ways.len() {
            let way = (step + turn) % ways.len();
            let start = Instant::now();
            ways[way].1.step()?;
            times[way].push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    for (way, engine) in ways.iter_mut() {
        if !engine.is_idle() {
            bail!("{way} is not done after {} steps", command.steps);
        }
    }
    Ok(())
}

impl Way {
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
    for way in &figures.ways {
        print(&format!(
            "{:<9} median {:.3} ms (middle half {:.3} to {:.3}), least {:.3} ms; overhead {:+.2}% of the median, {:+.2}% \
             of the least",
            way.name,
            way.median,
            way.quarter,
            way.three_quarters,
            way.least,
            way.overhead * 100.0,
            way.least_overhead * 100.0
        ))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overhead_is_over_the_linked_way() {
        let linked = Way::new("linked", vec![4.0, 1.0, 2.0, 3.0], None);
        assert_eq!((linked.median, linked.least, linked.overhead), (3.0, 1.0, 0.0));
        assert_eq!((linked.quarter, linked.three_quarters), (2.0, 4.0));
        let plugin = Way::new("plugin", vec![1.5, 6.0, 2.0], Some(&linked));
        assert_eq!((plugin.overhead, plugin.least_overhead), (2.0 / 3.0 - 1.0, 0.5));
    }
}
