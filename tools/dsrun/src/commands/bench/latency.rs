//! `dsrun bench latency`: measures the time to the first token and per token, and the share of the memory bandwidth.

use super::{
    bandwidth::read_bandwidth,
    median::median,
    prompts::prompt,
    streaming::{HostCache, Streaming},
};
use crate::{
    arguments::Latency,
    commands::{print, print_json, speculation_line},
    devices::open_devices,
    session::{engine_options, load_weights, open_draft, open_model, plan_engine, show_plan},
    terminal::Terminal,
    trace_file::TraceFile,
};
use anyhow::{Result, bail};
use dsrun_engine::{Bytes, Engine, Request, RequestId, SamplingOptions};
use serde::Serialize;
use std::{collections::HashSet, time::Instant};

/// The results of a measurement.
#[derive(Debug, Serialize)]
struct Figures {
    model: String,
    backend_device: String,
    /// Devices that the model is split over.
    ranks: usize,
    dtype: String,
    prompt_tokens: usize,
    generated_tokens: usize,
    batch: usize,
    repeats: usize,
    /// Seconds from the first request until all requests have their first token.
    first_token_seconds: f64,
    prompt_tokens_per_second: f64,
    /// The time per token of one request.
    ms_per_token: f64,
    /// The decode rate of all requests together.
    decode_tokens_per_second: f64,
    /// Proposed tokens of all runs.
    proposed_tokens: u64,
    /// Accepted tokens of all runs.
    accepted_tokens: u64,
    /// Bytes of weights and KV cache that a step reads, but for keys and values in host memory; with several ranks, those of rank 0 and its device.
    bytes_per_step: u64,
    read_bandwidth_bytes_per_second: f64,
    /// Bytes read per second of decoding, over the bandwidth.
    share_of_bandwidth: f64,
    /// The reads of KV cache in host memory, if any of it is there.
    host_cache: Option<HostCache>,
    /// The streaming of weights from host memory, if there is any.
    streaming: Option<Streaming>,
}

pub(crate) fn run(command: &Latency, terminal: &Terminal) -> Result<()> {
    let mut devices = open_devices(&command.setup.devices, terminal)?;
    // Declared before the engine, so that it is written after the engine has ended.
    let _trace = TraceFile::open(command.trace.as_deref(), &mut devices, terminal)?;
    let model = open_model(&command.setup.model, command.setup.engine.dtype, terminal)?;
    let draft = open_draft(
        &command.speculation,
        &command.setup.model,
        command.setup.engine.dtype,
        &devices,
        terminal,
    )?;
    let mut options = engine_options(&command.setup.engine, command.batch, &devices);
    options.speculation = command.speculation.speculation();
    options.ignore_end = true;
    // Without a prefix cache, every run computes its prompts.
    options.prefix_cache = false;
    let tokens = command.prompt + command.generate;
    options.context = Some(options.context.unwrap_or(tokens));
    let limit = model.config().context;
    if tokens > limit {
        bail!("--prompt and --gen together are {tokens} tokens, but the model takes {limit}");
    }
    if options.context < Some(tokens) {
        bail!("--prompt and --gen together are {tokens} tokens, more than --context");
    }
    terminal.note("measuring the device's read bandwidth");
    let bandwidth = read_bandwidth(&**devices.first())?;
    let plan = plan_engine(&model, draft.as_ref(), &devices, &options)?;
    let traffic = plan.step_traffic(&**devices.first(), command.batch)?;
    let ranks = plan.ranks();
    let forecasts = show_plan(&plan, &devices, terminal)?;
    let mut engine = load_weights(plan, &model, &devices, terminal)?;

    // The first run compiles the steps.
    run_once(&mut engine, command, model.config().vocabulary)?;
    engine.record_trace(true)?;
    let mut runs = Vec::new();
    for repeat in 0..command.measure.repeat {
        terminal.note(&format!("run {} of {}", repeat + 1, command.measure.repeat));
        runs.push(run_once(&mut engine, command, model.config().vocabulary)?);
    }
    let first = median(runs.iter().map(|run| run.first).collect());
    let step = median(runs.iter().map(|run| run.step).collect());
    let token = median(runs.iter().map(|run| run.token).collect());
    // The context of every request halfway through the answer.
    let context = (command.prompt + command.generate / 2) as u64;
    let bytes = traffic.weights + traffic.kv_per_token * context * command.batch as u64;
    let in_host =
        forecasts.host_cache.as_ref().map_or(0, |cache| cache.read_bytes(context * command.batch as u64));
    let figures = Figures {
        model: model.name().to_owned(),
        backend_device: devices.name(ranks),
        ranks,
        dtype: format!("{:?}", command.setup.engine.dtype).to_lowercase(),
        prompt_tokens: command.prompt,
        generated_tokens: command.generate,
        batch: command.batch,
        repeats: command.measure.repeat,
        first_token_seconds: first,
        prompt_tokens_per_second: (command.prompt * command.batch) as f64 / first,
        ms_per_token: token * 1e3,
        decode_tokens_per_second: command.batch as f64 / token,
        proposed_tokens: engine.statistics().proposed_tokens,
        accepted_tokens: engine.statistics().accepted_tokens,
        bytes_per_step: bytes - in_host,
        read_bandwidth_bytes_per_second: bandwidth,
        share_of_bandwidth: (bytes - in_host) as f64 / step / bandwidth,
        host_cache: forecasts.host_cache.map(|forecast| HostCache::new(in_host, step, &forecast)),
        streaming: forecasts.streaming.map(|forecast| {
            let rate = engine.statistics().disk_rate;
            Streaming::new(forecast.link_bytes, step, &forecast).with_disk(forecast.disk_bytes, rate)
        }),
    };
    if command.measure.json {
        return print_json(&figures);
    }
    show(&figures)?;
    speculation_line(engine.statistics()).map_or(Ok(()), |line| print(&format!("speculation  {line}")))
}

/// The times of a run in seconds.
struct Run {
    /// The time until all requests have their first token.
    first: f64,
    /// The mean time of the steps in which all requests generate.
    step: f64,
    /// The mean time per token of a request in those steps, which speculation makes less than a step.
    token: f64,
}

fn run_once(engine: &mut Engine, command: &Latency, vocabulary: usize) -> Result<Run> {
    let start = Instant::now();
    for request in 0..command.batch {
        let prompt = prompt(request, command.prompt, vocabulary);
        let sampling = SamplingOptions::default();
        engine.submit(Request {
            prompt,
            sampling,
            max_tokens: Some(command.generate),
            ..Request::default()
        })?;
    }
    let mut begun: HashSet<RequestId> = HashSet::new();
    let (mut first, mut before): (Option<Instant>, Option<Instant>) = (None, None);
    let (mut steps, mut tokens, mut seconds) = (0, 0, 0.0);
    while !engine.is_idle() {
        let events = engine.step()?;
        let now = Instant::now();
        let generating: HashSet<RequestId> = events.iter().map(|event| event.request).collect();
        begun.extend(&generating);
        if begun.len() == command.batch {
            first.get_or_insert(now);
        }
        // Steps that process prompts, or that lack requests that have ended, are not counted.
        let whole = generating.len() == command.batch;
        if let (true, Some(before)) = (whole, before) {
            steps += 1;
            tokens += events.len();
            seconds += (now - before).as_secs_f64();
        }
        before = whole.then_some(now);
    }
    if steps == 0 {
        bail!(
            "no two consecutive steps in which all {} requests generate\nhint: raise --gen or --step-tokens",
            command.batch
        );
    }
    let first = first.map_or(f64::NAN, |first| (first - start).as_secs_f64());
    let token = seconds * command.batch as f64 / tokens as f64;
    Ok(Run { first, step: seconds / f64::from(steps), token })
}

fn show(figures: &Figures) -> Result<()> {
    let bandwidth = figures.read_bandwidth_bytes_per_second / 1e9;
    print(&format!(
        "{} on {}, dtype {}: {} prompt tokens, {} generated, batch {}, median of {}",
        figures.model,
        figures.backend_device,
        figures.dtype,
        figures.prompt_tokens,
        figures.generated_tokens,
        figures.batch,
        figures.repeats,
    ))?;
    print(&format!(
        "first token  {:.1} ms ({:.1} prompt tokens/s)",
        figures.first_token_seconds * 1e3,
        figures.prompt_tokens_per_second
    ))?;
    print(&format!(
        "per token    {:.3} ms ({:.1} tokens/s in all)",
        figures.ms_per_token, figures.decode_tokens_per_second
    ))?;
    let reader = if figures.ranks == 1 { "" } else { " by rank 0" };
    print(&format!(
        "memory       {} read per step{reader}: {:.0}% of the {bandwidth:.1} GB/s the device reads",
        Bytes(figures.bytes_per_step),
        figures.share_of_bandwidth * 100.0
    ))?;
    if let Some(cache) = &figures.host_cache {
        print(&format!("kv cache     {cache}"))?;
    }
    figures.streaming.as_ref().map_or(Ok(()), |streaming| print(&format!("streaming    {streaming}")))
}
