//! `dsrun bench throughput`: measures tokens per second of many concurrent requests, and the host's share of a step.

use super::{prompts::prompt, streaming::Streaming};
use crate::{
    arguments::Throughput,
    commands::{print, print_json, speculation_line},
    devices::open_devices,
    session::{engine_options, load_weights, open_draft, open_model, plan_engine, show_plan},
    terminal::Terminal,
    trace_file::TraceFile,
};
use anyhow::{Result, bail};
use dsrun_engine::{Engine, Phase, Request, Statistics};
use serde::Serialize;
use std::time::{Duration, Instant};

/// What was measured.
#[derive(Debug, Serialize)]
struct Figures {
    model: String,
    backend_device: String,
    /// Devices that the model is split over.
    ranks: usize,
    dtype: String,
    requests: usize,
    /// Requests that run at the same time.
    batch: usize,
    prompt_tokens: usize,
    generated_tokens: usize,
    /// Tokens that a step may have.
    step_tokens: usize,
    /// Tokens that the KV cache holds.
    kv_tokens: usize,
    /// From the first request to the last token.
    seconds: f64,
    output_tokens_per_second: f64,
    /// Prompts and answers.
    tokens_per_second: f64,
    steps: u64,
    ms_per_step: f64,
    preemptions: u64,
    proposed_tokens: u64,
    accepted_tokens: u64,
    /// Host time per step, by phase. Time that the device makes the host wait while a step is launched counts as the
    /// launch's.
    host_ms_per_step: Vec<(&'static str, f64)>,
    /// The share of the time in which the host did not just wait; a second model's steps count as waiting.
    host_share: f64,
    /// The streaming of weights from host memory, if there is any.
    streaming: Option<Streaming>,
}

pub(crate) fn run(command: &Throughput, terminal: &Terminal) -> Result<()> {
    let mut devices = open_devices(&command.setup.devices, terminal)?;
    // Declared before the engine, so that it is written after the engine has ended.
    let _trace = TraceFile::open(command.trace.as_deref(), &mut devices, terminal)?;
    let model = open_model(&command.setup.model, command.setup.engine.dtype, terminal)?;
    let batch = command.batch.unwrap_or(command.requests);
    let draft = open_draft(
        &command.speculation,
        &command.setup.model,
        command.setup.engine.dtype,
        &devices,
        terminal,
    )?;
    let mut options = engine_options(&command.setup.engine, batch, &devices);
    options.speculation = command.speculation.speculation();
    options.ignore_end = true;
    // Every request computes its prompt, in the second run too.
    options.prefix_cache = false;
    options.kv_tokens = command.kv_tokens;
    options.swap_tokens = command.swap_tokens.unwrap_or(0);
    let tokens = command.prompt + command.generate;
    options.context = Some(options.context.unwrap_or(tokens));
    if options.context < Some(tokens) {
        bail!("--prompt and --gen together are {tokens} tokens, more than --context");
    }
    let plan = plan_engine(&model, draft.as_ref(), &devices, &options)?;
    let ranks = plan.ranks();
    let forecasts = show_plan(&plan, &devices, terminal)?;
    let mut engine = load_weights(plan, &model, &devices, terminal)?;
    let vocabulary = model.config().vocabulary;
    terminal.note("a first run, which compiles the steps");
    // Until the last prompts are there every request generates, as later: the same kinds of step come up, but fewer of each.
    let prompt_steps = (command.requests * command.prompt).div_ceil(engine.step_tokens());
    run_once(&mut engine, command, vocabulary, command.generate.min(prompt_steps + 8))?;
    let before = engine.statistics().clone();
    terminal.note("the run that counts");
    engine.record_trace(true)?;
    let seconds = run_once(&mut engine, command, vocabulary, command.generate)?.as_secs_f64();
    let after = engine.statistics();
    let steps = after.steps - before.steps;
    let streamed = after.streamed_bytes - before.streamed_bytes;
    let phases =
        Phase::ALL.map(|phase| (phase.name(), phase_seconds(after, phase) - phase_seconds(&before, phase)));
    let waits = [Phase::Wait, Phase::Draft].map(Phase::name);
    let host: f64 = phases.iter().filter(|(name, _)| !waits.contains(name)).map(|(_, time)| time).sum();
    let output = (command.requests * command.generate) as f64;
    let figures = Figures {
        model: model.name().to_owned(),
        backend_device: devices.name(ranks),
        ranks,
        dtype: format!("{:?}", command.setup.engine.dtype).to_lowercase(),
        requests: command.requests,
        batch,
        prompt_tokens: command.prompt,
        generated_tokens: command.generate,
        step_tokens: engine.step_tokens(),
        kv_tokens: engine.limits().pages * engine.limits().block_size,
        seconds,
        output_tokens_per_second: output / seconds,
        tokens_per_second: (command.requests * tokens) as f64 / seconds,
        steps,
        ms_per_step: seconds * 1e3 / steps.max(1) as f64,
        preemptions: after.preemptions - before.preemptions,
        proposed_tokens: after.proposed_tokens - before.proposed_tokens,
        accepted_tokens: after.accepted_tokens - before.accepted_tokens,
        host_ms_per_step: phases.map(|(name, time)| (name, time * 1e3 / steps.max(1) as f64)).into(),
        host_share: host / seconds,
        streaming: forecasts.streaming.map(|forecast| {
            let read = after.disk_bytes - before.disk_bytes;
            Streaming::new(streamed, seconds, &forecast).with_disk(read, after.disk_rate)
        }),
    };
    if command.json {
        return print_json(&figures);
    }
    show(&figures)?;
    speculation_line(engine.statistics()).map_or(Ok(()), |line| print(&format!("speculation  {line}")))
}

fn run_once(
    engine: &mut Engine,
    command: &Throughput,
    vocabulary: usize,
    generate: usize,
) -> Result<Duration> {
    let start = Instant::now();
    for request in 0..command.requests {
        let prompt = prompt(request, command.prompt, vocabulary);
        engine.submit(Request { max_tokens: Some(generate), ..Request::new(prompt) })?;
    }
    let mut generated = 0;
    while !engine.is_idle() {
        generated += engine.step()?.len();
    }
    if generated != command.requests * generate {
        bail!("{generated} tokens came, not {}", command.requests * generate);
    }
    Ok(start.elapsed())
}

fn phase_seconds(statistics: &Statistics, phase: Phase) -> f64 {
    statistics.phases[phase as usize].sum().as_secs_f64()
}

fn show(figures: &Figures) -> Result<()> {
    print(&format!(
        "{} on {}, dtype {}: {} requests, {} at a time, {} prompt tokens and {} generated each",
        figures.model,
        figures.backend_device,
        figures.dtype,
        figures.requests,
        figures.batch,
        figures.prompt_tokens,
        figures.generated_tokens,
    ))?;
    print(&format!(
        "throughput   {:.1} output tokens/s, {:.1} with prompts, in {:.2} s",
        figures.output_tokens_per_second, figures.tokens_per_second, figures.seconds
    ))?;
    print(&format!(
        "steps        {} of {:.3} ms, up to {} tokens each; {} pre-emptions with {} tokens of KV cache",
        figures.steps, figures.ms_per_step, figures.step_tokens, figures.preemptions, figures.kv_tokens
    ))?;
    let phases: Vec<String> =
        figures.host_ms_per_step.iter().map(|(name, ms)| format!("{name} {ms:.3}")).collect();
    print(&format!(
        "host         {:.1}% of the time; ms per step: {}",
        figures.host_share * 100.0,
        phases.join(", ")
    ))?;
    figures.streaming.as_ref().map_or(Ok(()), |streaming| print(&format!("streaming    {streaming}")))
}
