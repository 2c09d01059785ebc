//! `dsrun bench prefill`: measures how fast prompts are processed, or the texts of an encoder.

use super::{median::median, prompts::prompt};
use crate::{
    arguments::Prefill,
    commands::{print, print_json},
    devices::open_devices,
    session::{engine_options, load_plan, open_model, plan_engine},
    terminal::Terminal,
};
use anyhow::{Result, bail};
use dsrun_engine::{EmbeddingRequest, Engine, Request, SamplingOptions};
use serde::Serialize;
use std::{
    thread,
    time::{Duration, Instant},
};

/// The results of a measurement.
#[derive(Debug, Serialize)]
struct Figures {
    model: String,
    backend_device: String,
    /// Devices that the model is split over.
    ranks: usize,
    dtype: String,
    batch: usize,
    repeats: usize,
    /// The pause before each run.
    pause_seconds: u64,
    /// Tokens that a step may process.
    step_tokens: usize,
    /// Whether the model is an encoder.
    encoder: bool,
    prompts: Vec<Prompt>,
}

/// The figures of one prompt length.
#[derive(Debug, Serialize)]
struct Prompt {
    tokens: usize,
    /// Seconds from the first request until all requests have their first token, or all texts their vector.
    seconds: f64,
    tokens_per_second: f64,
    /// Operations of matrix products per second, attention included; with several ranks, those of rank 0.
    operations_per_second: f64,
}

pub(crate) fn run(command: &Prefill, terminal: &Terminal) -> Result<()> {
    let devices = open_devices(&command.setup.devices, terminal)?;
    let model = open_model(&command.setup.model, command.setup.engine.dtype, terminal)?;
    let longest = command.prompt.iter().copied().max().unwrap_or(1);
    let mut options = engine_options(&command.setup.engine, command.batch, &devices);
    options.ignore_end = true;
    // Without a prefix cache, every run computes its prompts.
    options.prefix_cache = false;
    // A step holds whole prompts by default.
    options.step_tokens = command.setup.engine.step_tokens.unwrap_or(longest * command.batch);
    options.context = Some(options.context.unwrap_or(longest));
    let limit = model.config().context;
    if longest > limit {
        bail!("--prompt has {longest} tokens, but the model takes {limit}");
    }
    if options.context < Some(longest) {
        bail!("--prompt has {longest} tokens, more than --context");
    }
    let plan = plan_engine(&model, None, &devices, &options)?;
    let products: Vec<u64> = command.prompt.iter().map(|tokens| plan.prompt_products(*tokens)).collect();
    let ranks = plan.ranks();
    let mut engine = load_plan(plan, &model, &devices, terminal)?;
    let vocabulary = model.config().vocabulary;
    let mut prompts = Vec::new();
    for (tokens, products) in command.prompt.iter().copied().zip(products) {
        terminal.note(&format!("{tokens} tokens"));
        // The first run compiles the step.
        run_once(&mut engine, command.batch, tokens, vocabulary)?;
        let runs = (0..command.measure.repeat).map(|_| {
            thread::sleep(Duration::from_secs(command.pause));
            run_once(&mut engine, command.batch, tokens, vocabulary)
        });
        let seconds = median(runs.collect::<Result<_>>()?);
        prompts.push(Prompt {
            tokens,
            seconds,
            tokens_per_second: (tokens * command.batch) as f64 / seconds,
            operations_per_second: 2.0 * products as f64 * command.batch as f64 / seconds,
        });
    }
    let figures = Figures {
        model: model.name().to_owned(),
        backend_device: devices.name(ranks),
        ranks,
        dtype: format!("{:?}", command.setup.engine.dtype).to_lowercase(),
        batch: command.batch,
        repeats: command.measure.repeat,
        pause_seconds: command.pause,
        step_tokens: options.step_tokens,
        encoder: engine.limits().encoder,
        prompts,
    };
    if command.measure.json { print_json(&figures) } else { show(&figures) }
}

/// Seconds until all prompts have their first token, or all texts their vector.
fn run_once(engine: &mut Engine, batch: usize, tokens: usize, vocabulary: usize) -> Result<f64> {
    let encodes = engine.limits().encoder;
    let start = Instant::now();
    for request in 0..batch {
        let prompt = prompt(request, tokens, vocabulary);
        if encodes {
            engine.submit_embedding(EmbeddingRequest { tokens: prompt, ..EmbeddingRequest::default() })?;
            continue;
        }
        engine.submit(Request {
            prompt,
            sampling: SamplingOptions::default(),
            max_tokens: Some(1),
            ..Request::default()
        })?;
    }
    while !engine.is_idle() {
        engine.step()?;
    }
    engine.take_embeddings();
    Ok(start.elapsed().as_secs_f64())
}

fn show(figures: &Figures) -> Result<()> {
    let pauses = match figures.pause_seconds {
        0 => String::new(),
        seconds => format!(", pauses of {seconds} s"),
    };
    print(&format!(
        "{} on {}, dtype {}: batch {}, steps of up to {} tokens, median of {}{pauses}",
        figures.model,
        figures.backend_device,
        figures.dtype,
        figures.batch,
        figures.step_tokens,
        figures.repeats
    ))?;
    let answer = if figures.encoder { "vector" } else { "first token" };
    print(&format!("{:>8} {:>12} {:>12} {:>10}", "tokens", answer, "tokens/s", "TFLOP/s"))?;
    for prompt in &figures.prompts {
        print(&format!(
            "{:>8} {:>9.2} ms {:>12.1} {:>10.3}",
            prompt.tokens,
            prompt.seconds * 1e3,
            prompt.tokens_per_second,
            prompt.operations_per_second / 1e12
        ))?;
    }
    Ok(())
}
