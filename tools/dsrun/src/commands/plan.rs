//! `dsrun plan`: predicts memory and speed of a model on devices that need not be here.

use super::{print, print_json};
use crate::{
    arguments::{ModelArguments, Plan, Weights},
    session::{default_step_tokens, open_model},
    terminal::Terminal,
};
use anyhow::{Context, Result, anyhow, bail};
use dsrun_engine::{
    Bytes, EngineOptions, KvIn,
    passes::partition::PipelineOptions,
    planner::{
        Bound, Forecast, Load, StageForecast, best_batch, forecast,
        hardware::{Hardware, Network},
        timeline::Timeline,
    },
};
use dsrun_models::{model::Model, presets::Preset};
use serde_json::json;
use std::fs;

/// Tokens of an answer in timelines.
const ANSWER: usize = 16;

pub(crate) fn run(command: &Plan, terminal: &Terminal) -> Result<()> {
    let hardware = hardware(command)?;
    // Forecasts need the sizes of weights and not their values.
    let weights = if Preset::from_name(&command.model).is_some() { Weights::Random } else { Weights::File };
    let named = ModelArguments { model: command.model.clone(), weights, offline: command.offline };
    let model = open_model(&named, command.dtype, terminal)?;
    let longest = model.config().context;
    let context = command.context.unwrap_or_else(|| longest.min(EngineOptions::DEFAULT_CONTEXT));
    let prompt = command.prompt.unwrap_or(context / 2).max(1);
    if prompt > context {
        bail!(
            "--prompt {prompt} is longer than the context of {context} tokens\nhint: choose a larger --context"
        );
    }
    let load = Load { requests: command.batch, context, prompt };
    let default = EngineOptions::default();
    let options = EngineOptions {
        precision: command.dtype.into(),
        step_tokens: command.step_tokens.unwrap_or_else(|| default_step_tokens(hardware.memory)),
        quantize: command.quantize.clone(),
        kv_in: command.kv_in,
        pipeline: PipelineOptions { micro_batches: command.micro_batches, ..PipelineOptions::default() },
        ..default
    };
    let mesh = command.mesh.map(|mesh| (usize::from(mesh.tp), usize::from(mesh.pp)));
    // A mesh says how many devices there are.
    let devices = mesh.filter(|_| command.devices == 1).map_or(command.devices, |(tp, pp)| tp * pp);
    let forecasts = forecast(&model, devices, mesh, &hardware, &options, load)?;
    let best = forecasts.first().context("the model cannot be divided over this number of devices")?;
    if command.micro_batches.is_some() && forecasts.iter().all(|forecast| forecast.pp == 1) {
        bail!(
            "--micro-batches is for the stages of a pipeline, and there is one stage\nhint: give --mesh, or more --devices"
        );
    }
    let timeline = match &command.timeline {
        None => None,
        Some(path) => {
            let timeline = timeline(best, longest, &hardware, &options, load)?;
            fs::write(path, timeline.svg("us"))
                .with_context(|| format!("{} cannot be written", path.display()))?;
            Some(timeline.bubble())
        }
    };
    if command.json {
        return print_json(&json!({
            "model": model.name(),
            "device": hardware.name,
            "devices": devices,
            "load": load,
            "forecasts": forecasts,
            "idle": timeline,
        }));
    }
    print(&format!(
        "{} on {devices} x {}: {} of {context} tokens, predicted from bytes and operations",
        model.name(),
        hardware.name,
        if load.requests == 1 { "1 request".into() } else { format!("{} requests", load.requests) },
    ))?;
    print(&format!(
        "{:12} {:>12} {:>14} {:>10} {:>10} {:>14}",
        "mesh", "memory/rank", "read/token", "ms/token", "tokens/s", "first token ms"
    ))?;
    for forecast in &forecasts {
        print(&row(forecast))?;
    }
    if let Some(line) = host_cache(best, &hardware) {
        print(&line)?;
    }
    let free = Bytes(hardware.memory.unwrap_or(0));
    if best.streamed_bytes() > 0 {
        print(&streaming(&model, best, &hardware, &options, load)?)?;
    } else if best.fits == Some(false) {
        let or_host =
            if command.kv_in == KvIn::Host { "or --quantize" } else { "--quantize, or --kv-in host" };
        terminal.note(&format!(
            "no mesh fits into {free} of each device: use more --devices, a smaller --context, fewer requests, {or_host}"
        ));
    }
    if command.explain {
        print(&explained(best, &hardware))?;
        if best.pp > 1 {
            for line in micro_batches(&model, best, &hardware, &options, load)? {
                print(&line)?;
            }
        }
    }
    match timeline {
        Some(idle) => print(&format!("stages idle for {:.1}% of the timeline's time", 100.0 * idle)),
        None => Ok(()),
    }
}

/// The timeline of the load, with short answers.
fn timeline(
    forecast: &Forecast,
    longest: usize,
    hardware: &Hardware,
    options: &EngineOptions,
    load: Load,
) -> Result<Timeline> {
    let answer = ANSWER.min(load.context - load.prompt).max(1);
    let load = Load { prompt: load.prompt.min(load.context - answer).max(1), ..load };
    Ok(forecast.timeline(longest, hardware, options, load, answer)?)
}

/// The time of the load's timeline with different numbers of micro-batches: that of the options, one for each stage, and the number
/// of GPipe's rule, four for each stage.
fn micro_batches(
    model: &Model,
    best: &Forecast,
    hardware: &Hardware,
    options: &EngineOptions,
    load: Load,
) -> Result<Vec<String>> {
    let (tp, pp, longest) = (best.tp, best.pp, model.config().context);
    let mut lines = Vec::new();
    let own = timeline(best, longest, hardware, options, load)?;
    for count in [options.pipeline.micro_batches, Some(pp), Some(4 * pp)] {
        let pipeline = PipelineOptions { micro_batches: count, ..options.pipeline.clone() };
        let options = EngineOptions { pipeline, ..options.clone() };
        let found = forecast(model, tp * pp, Some((tp, pp)), hardware, &options, load)?;
        let found = found.first().context("the mesh has no forecast")?;
        let timeline = timeline(found, longest, hardware, &options, load)?;
        let name = match count {
            None => "many micro-batches for prompts and one for each stage for generation".to_owned(),
            Some(count) => format!("{count} micro-batches for both"),
        };
        lines.push(format!(
            "{name}: prompts and answers of {ANSWER} tokens take {:.1} ms ({:.2}x), stages idle for {:.1}%",
            timeline.end() / 1e3,
            timeline.end() / own.end(),
            100.0 * timeline.bubble()
        ));
    }
    Ok(lines)
}

/// The figures of the devices that the arguments describe.
fn hardware(command: &Plan) -> Result<Hardware> {
    let mut hardware = Hardware::named(&command.device).ok_or_else(|| {
        let names = Hardware::names().join(", ");
        anyhow!(
            "there are no figures of a device `{}`\nhint: choose one of {names}, and replace its figures with --memory, \
             --memory-bandwidth, --operations, --link-bandwidth, --latency-us and --host-bandwidth",
            command.device
        )
    })?;
    let costs = &mut hardware.costs;
    let mut memory = None;
    let figures = [
        ("--memory", command.memory, 1e9, None),
        ("--memory-bandwidth", command.memory_bandwidth, 1e9, Some(&mut costs.memory_bandwidth)),
        ("--operations", command.operations, 1e12, Some(&mut costs.operations)),
        ("--link-bandwidth", command.link_bandwidth, 1e9, Some(&mut costs.link_bandwidth)),
        ("--latency-us", command.latency_us, 1.0, Some(&mut costs.latency_us)),
        ("--host-bandwidth", command.host_bandwidth, 1e9, Some(&mut hardware.host_bandwidth)),
    ];
    for (flag, value, unit, place) in figures {
        let Some(value) = positive(flag, value, flag == "--latency-us")? else { continue };
        match place {
            Some(place) => *place = value * unit,
            None => memory = Some((value * unit) as u64),
        }
    }
    if let Some(latency) = command.latency_us {
        hardware.costs.gather_latency_us = latency;
    }
    hardware.memory = memory.or(hardware.memory);
    if let Some(per_host) = command.per_host {
        let mut network = Network { per_host, ..Network::FAST };
        if let Some(bandwidth) = positive("--network-bandwidth", command.network_bandwidth, false)? {
            network.bandwidth = bandwidth * 1e9;
        }
        if let Some(latency) = positive("--network-latency-us", command.network_latency_us, true)? {
            network.latency_us = latency;
        }
        hardware.network = Some(network);
    }
    Ok(hardware)
}

/// The value of a flag, which must be positive, or may also be 0.
fn positive(flag: &str, value: Option<f64>, or_zero: bool) -> Result<Option<f64>> {
    match value {
        Some(value) if !value.is_finite() || value < 0.0 || (value == 0.0 && !or_zero) => {
            bail!("{flag} is {value}, but must be positive")
        }
        value => Ok(value),
    }
}

fn row(forecast: &Forecast) -> String {
    let Forecast { tp, pp, token_ms, tokens_per_second, first_token_ms, .. } = forecast;
    let fits = match (forecast.fits, forecast.streamed_bytes()) {
        (Some(false), 0) => "  does not fit".to_owned(),
        (Some(false), streamed) => format!("  streams {}", Bytes(streamed)),
        _ => String::new(),
    };
    format!(
        "{:12} {:>12} {:>14} {token_ms:>10.3} {tokens_per_second:>10.1} {first_token_ms:>14.1}{fits}",
        format!("tp={tp},pp={pp}"),
        Bytes(forecast.memory()).to_string(),
        Bytes(forecast.bytes_per_token).to_string(),
    )
}

/// What a mesh reads of the KV cache in host memory, if anything.
fn host_cache(best: &Forecast, hardware: &Hardware) -> Option<String> {
    let of_stages = || best.stages.iter().filter_map(|stage| stage.host_cache);
    let most = of_stages().map(|cache| cache.bytes).max()?;
    Some(format!(
        "the KV cache of {} layers is in host memory, {} of each rank when all contexts are full, which generation reads there at {:.0} GB/s",
        of_stages().map(|cache| cache.layers).sum::<usize>(),
        Bytes(most),
        hardware.host_bandwidth / 1e9
    ))
}

/// What a mesh that streams weights copies, and how many requests generate most.
fn streaming(
    model: &Model,
    best: &Forecast,
    hardware: &Hardware,
    options: &EngineOptions,
    load: Load,
) -> Result<String> {
    let stages = || best.stages.iter().filter_map(|stage| stage.streamed);
    let streamed: usize = stages().map(|streamed| streamed.layers).sum();
    let resident: usize = stages().map(|streamed| streamed.resident_layers).sum();
    let layers = streamed + resident;
    let what = match stages().all(|streamed| streamed.in_place) {
        true => format!(
            "a step reads the experts that it chooses in {streamed} of {layers} layers in host memory"
        ),
        false => {
            let what = if stages().all(|streamed| streamed.of_experts) { "the experts of " } else { "" };
            format!("{what}{streamed} of {layers} layers are copied from host memory in every step")
        }
    };
    let mut text = format!(
        "the weights do not fit: {what}, {} on each rank at {:.0} GB/s",
        Bytes(best.streamed_bytes()),
        hardware.host_bandwidth / 1e9,
    );
    if best.stages.iter().all(|stage| stage.host_cache.is_none()) {
        text += &format!(
            "\nbelow about {:.0} requests memory is worth more as KV cache of further requests than as resident layers",
            best.cache_threshold(load)
        );
    }
    if let Some((requests, most)) = best_batch(model, (best.tp, best.pp), hardware, options, load)? {
        text += &format!(
            "\nmost tokens: {requests} requests generate {:.1} tokens/s, {:.1} ms a token (--batch {requests}){}",
            most.tokens_per_second,
            most.token_ms,
            most.stages
                .iter()
                .filter_map(|stage| stage.host_cache)
                .map(|cache| cache.bytes)
                .max()
                .map_or_else(String::new, |bytes| format!(
                    ", with {} of KV cache in host memory",
                    Bytes(bytes)
                ))
        );
    }
    if options.quantize.is_none() {
        text += "\nhint: --quantize w4a16 copies a quarter of the bytes of bf16";
    }
    Ok(text)
}

/// What bounds each stage of a mesh.
fn explained(forecast: &Forecast, hardware: &Hardware) -> String {
    let costs = &hardware.costs;
    let mut lines = vec![format!(
        "{}: {:.0} GB/s of memory, {:.0} TFLOPS, {:.0} GB/s and {} us between devices",
        hardware.name,
        costs.memory_bandwidth / 1e9,
        costs.operations / 1e12,
        costs.link_bandwidth / 1e9,
        costs.latency_us
    )];
    if let Some(Network { per_host, bandwidth, latency_us }) = &hardware.network {
        lines.push(format!(
            "{per_host} devices on each host: {:.0} GB/s and {latency_us} us between hosts",
            bandwidth / 1e9
        ));
    }
    for (stage, own) in forecast.stages.iter().enumerate() {
        let StageForecast {
            weights,
            states,
            step_us,
            read_us,
            compute_us,
            exchange_us,
            choice_us,
            bound,
            ..
        } = own;
        let bound = match bound {
            Bound::Memory => "memory bandwidth",
            Bound::Operations => "operations",
            Bound::LinkBandwidth => "the bandwidth between devices",
            Bound::LinkLatency => "the latency between devices",
            Bound::Choices => "the choice of experts",
            Bound::HostBandwidth => "the link to host memory",
        };
        let choosing =
            if *choice_us > 0.0 { format!(", {choice_us:.0} choosing experts") } else { String::new() };
        lines.push(format!(
            "stage {} of {}: {} of weights and {} of states on each rank; a step takes {step_us:.0} us: {read_us:.0} reading, \
             {compute_us:.0} computing, {exchange_us:.0} exchanging{choosing}; bound by {bound}",
            stage + 1,
            forecast.pp,
            Bytes(*weights),
            Bytes(*states),
        ));
    }
    if forecast.pp > 1 {
        lines.push(format!("stage {} is the slowest, and the others wait for it", forecast.slowest() + 1));
    }
    lines.join("\n")
}
