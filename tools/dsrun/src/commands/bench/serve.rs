//! `dsrun bench serve`: measures the latency and throughput of a server under load.

mod lengths;
mod load;
mod plot;
mod report;

use super::prompts::words;
use crate::{
    arguments::BenchServe,
    client::Client,
    commands::{print, print_json},
    terminal::Terminal,
};
use anyhow::{Context, Result, bail};
pub(crate) use lengths::Lengths;
use load::{Arrivals, Job, run_load};
use rand::{Rng, SeedableRng, rngs::StdRng};
pub(super) use report::Run;
use report::{Point, Sla};
use serde_json::{Value, json};
use std::{path::Path, sync::Arc, time::Duration};

/// The smallest token id of random prompts; smaller ids are often special tokens.
const FIRST_TOKEN: u32 = 100;

pub(crate) fn run(command: &BenchServe, terminal: &Terminal) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("cannot start the threads of the client")?;
    let run = runtime.block_on(measure(command, terminal))?;
    if let Some(path) = &command.plot {
        draw(std::slice::from_ref(&run), path, terminal)?;
    }
    if command.json {
        return print_json(&run);
    }
    print(&report::table(&run))
}

/// Draws runs into one figure.
pub(super) fn draw(runs: &[Run], path: &Path, terminal: &Terminal) -> Result<()> {
    std::fs::write(path, plot::svg(runs)).with_context(|| format!("cannot write {}", path.display()))?;
    terminal.note(&format!("the plot is in {}", path.display()));
    Ok(())
}

async fn measure(command: &BenchServe, terminal: &Terminal) -> Result<Run> {
    let loads = loads(command)?;
    let client = Client::new(&command.url, command.api_key.clone())?;
    let model = match &command.model {
        Some(model) => model.clone(),
        None => first_model(&client).await?,
    };
    let timeout = Duration::from_secs(command.timeout);
    let sla = Sla { prompt_tokens_per_second: command.sla_prompt, tokens_per_second: command.sla_gen };
    let mut points = Vec::new();
    if command.warm_up > 0 {
        terminal.note(&format!("warming up with {} requests", command.warm_up));
        let jobs = jobs(command, &model, command.warm_up, u64::MAX);
        let records = run_load(&client, jobs, &Arrivals::Clients(command.warm_up), timeout).await;
        let first_error = records.iter().find_map(|record| record.outcome.as_ref().err());
        if let Some(error) = first_error {
            bail!("the server does not answer: {error}");
        }
    }
    for (index, arrivals) in loads.iter().enumerate() {
        terminal.note(&format!("{} requests, {arrivals}", command.requests));
        let jobs = jobs(command, &model, command.requests, index as u64);
        let records = run_load(&client, jobs, arrivals, timeout).await;
        let point = Point::new(arrivals, &records, &sla);
        for error in &point.errors {
            terminal.note(&format!("{} times: {}", error.count, error.message));
        }
        points.push(point);
    }
    Ok(Run {
        label: command.label.clone().unwrap_or_else(|| model.clone()),
        model,
        prompt_tokens: command.prompt.to_string(),
        generated_tokens: command.generate.to_string(),
        requests: command.requests,
        sla,
        points,
    })
}

fn loads(command: &BenchServe) -> Result<Vec<Arrivals>> {
    if let Some(rate) = command.rate.iter().find(|rate| !(rate.is_finite() && **rate > 0.0)) {
        bail!("--rate is {rate}; it must be above 0");
    }
    let rates = command.rate.iter().map(|rate| Arrivals::Poisson { rate: *rate, seed: command.seed });
    let clients = command.clients.iter().map(|clients| Arrivals::Clients(*clients));
    let loads: Vec<Arrivals> = rates.chain(clients).collect();
    Ok(if loads.is_empty() { vec![Arrivals::Clients(1)] } else { loads })
}

async fn first_model(client: &Client) -> Result<String> {
    let models = client.json("/v1/models").await?;
    let id = models.pointer("/data/0/id").and_then(Value::as_str);
    id.map(str::to_owned).context("the server lists no models\nhint: name one with --model")
}

/// The requests of one load. Loads have different prompts, so that none finds its prompts in the prefix cache.
fn jobs(command: &BenchServe, model: &str, count: usize, stream: u64) -> Vec<Job> {
    let mut random = StdRng::seed_from_u64(command.seed ^ stream.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let path: Arc<str> = if command.chat { "/v1/chat/completions" } else { "/v1/completions" }.into();
    let job = |_| {
        let prompt_tokens = command.prompt.draw(&mut random);
        let mut body = json!({
            "model": model,
            "stream": true,
            "stream_options": {"include_usage": true},
            "max_tokens": command.generate.draw(&mut random),
            "temperature": 0,
        });
        if command.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        if command.token_ids {
            body["return_token_ids"] = true.into();
        }
        if command.chat {
            body["messages"] = json!([{"role": "user", "content": words(&mut random, prompt_tokens)}]);
        } else if command.text {
            body["prompt"] = words(&mut random, prompt_tokens).into();
        } else {
            let tokens: Vec<u32> =
                (0..prompt_tokens).map(|_| token(&mut random, command.vocabulary)).collect();
            body["prompt"] = tokens.into();
        }
        Job { path: path.clone(), body, prompt_tokens }
    };
    (0..count).map(job).collect()
}

fn token(random: &mut StdRng, vocabulary: u32) -> u32 {
    if vocabulary > FIRST_TOKEN {
        random.random_range(FIRST_TOKEN..vocabulary)
    } else {
        random.random_range(0..vocabulary)
    }
}
