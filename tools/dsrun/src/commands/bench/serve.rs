//! `dsrun bench serve`: measures the latency and throughput of a server under load.

mod load;
mod plot;
mod report;

use super::prompts::words;
use crate::{
    arguments::{BenchServe, Lengths},
    client::Client,
    commands::{print, print_json},
    terminal::Terminal,
};
use anyhow::{Context, Result, bail};
use load::{Arrivals, Extent, Job, run_load};
use rand::{Rng, SeedableRng, rngs::StdRng};
pub(super) use report::Run;
use report::{Point, Sla};
use serde_json::{Value, json};
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// Tokens of a prompt and of its answer, if none are given.
const SIZES: Sizes = Sizes { prompt: Lengths::Fixed(512), generate: Lengths::Fixed(128) };
/// The sizes are halved at most this often on a slow server.
const MOST_HALVINGS: u32 = 4;

/// The lengths of prompts and answers.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sizes {
    prompt: Lengths,
    generate: Lengths,
}

impl Sizes {
    /// The default sizes, halved this often.
    fn halved(times: u32) -> Self {
        let part = |length: usize| Lengths::Fixed(length >> times);
        Self { prompt: part(512), generate: part(128) }
    }
}

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
    let sizes = sizes(command, &client, &model, terminal).await?;
    if command.warm_up > 0 {
        terminal.note(&format!("warming up with {} requests", command.warm_up));
        warm_up(command, &client, &model, sizes, command.warm_up).await?;
    }
    let extent =
        command.requests.map_or(Extent::Time(Duration::from_secs(command.seconds)), Extent::Requests);
    for (index, arrivals) in loads.iter().enumerate() {
        match extent {
            Extent::Requests(requests) => terminal.note(&format!("{requests} requests, {arrivals}")),
            Extent::Time(time) => terminal.note(&format!("{} s, {arrivals}", time.as_secs())),
        }
        let jobs = jobs(command, &model, sizes, index as u64);
        let records = run_load(&client, jobs, arrivals, extent, timeout).await;
        let point = Point::new(arrivals, &records, &sla);
        for error in &point.errors {
            terminal.note(&format!("{} times: {}", error.count, error.message));
        }
        points.push(point);
    }
    Ok(Run {
        label: command.label.clone().unwrap_or_else(|| model.clone()),
        model,
        prompt_tokens: sizes.prompt.to_string(),
        generated_tokens: sizes.generate.to_string(),
        requests: command.requests,
        load_seconds: command.requests.is_none().then_some(command.seconds),
        sla,
        points,
    })
}

/// Sends requests whose answers are not measured, all at once.
async fn warm_up(
    command: &BenchServe,
    client: &Client,
    model: &str,
    sizes: Sizes,
    count: usize,
) -> Result<()> {
    let jobs = jobs(command, model, sizes, u64::MAX);
    let (arrivals, extent) = (Arrivals::Clients(count), Extent::Requests(count));
    let records = run_load(client, jobs, &arrivals, extent, Duration::from_secs(command.timeout)).await;
    match records.iter().find_map(|record| record.outcome.as_ref().err()) {
        Some(error) => bail!("the server does not answer: {error}"),
        None => Ok(()),
    }
}

/// The lengths of prompts and answers: those given, or as large as lets a load have several requests, by the time that a small
/// request takes.
async fn sizes(command: &BenchServe, client: &Client, model: &str, terminal: &Terminal) -> Result<Sizes> {
    if command.prompt.is_some() || command.generate.is_some() || command.requests.is_some() {
        return Ok(Sizes {
            prompt: command.prompt.unwrap_or(SIZES.prompt),
            generate: command.generate.unwrap_or(SIZES.generate),
        });
    }
    let start = Instant::now();
    warm_up(command, client, model, Sizes::halved(MOST_HALVINGS), 1).await?;
    let halvings = halvings(start.elapsed(), Duration::from_secs(command.seconds));
    let sizes = Sizes::halved(halvings);
    if halvings > 0 {
        terminal.note(&format!(
            "prompts of {} tokens and answers of {}, because the server is slow; --prompt and --gen choose others",
            sizes.prompt, sizes.generate
        ));
    }
    Ok(sizes)
}

/// How often the default sizes are halved so that a third of a load has room for a request, given the time of a request of the smallest
/// sizes.
fn halvings(smallest: Duration, load: Duration) -> u32 {
    let fits = |halvings: &u32| {
        smallest.as_secs_f64() * f64::from(1 << (MOST_HALVINGS - halvings)) <= load.as_secs_f64() / 3.0
    };
    (0..MOST_HALVINGS).find(fits).unwrap_or(MOST_HALVINGS)
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
fn jobs(
    command: &BenchServe,
    model: &str,
    sizes: Sizes,
    stream: u64,
) -> impl Iterator<Item = Job> + Send + 'static {
    let mut random = StdRng::seed_from_u64(command.seed ^ stream.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let path: Arc<str> = if command.chat { "/v1/chat/completions" } else { "/v1/completions" }.into();
    let (ignore_eos, token_ids) = (command.ignore_eos, command.token_ids);
    let (chat, text, vocabulary) = (command.chat, command.text, command.vocabulary);
    let model = model.to_owned();
    std::iter::repeat_with(move || {
        let prompt_tokens = sizes.prompt.draw(&mut random);
        let mut body = json!({
            "model": model,
            "stream": true,
            "stream_options": {"include_usage": true},
            "max_tokens": sizes.generate.draw(&mut random),
            "temperature": 0,
        });
        if ignore_eos {
            body["ignore_eos"] = true.into();
        }
        if token_ids {
            body["return_token_ids"] = true.into();
        }
        if chat {
            body["messages"] = json!([{"role": "user", "content": words(&mut random, prompt_tokens)}]);
        } else if text {
            body["prompt"] = words(&mut random, prompt_tokens).into();
        } else {
            let tokens: Vec<u32> = (0..prompt_tokens).map(|_| token(&mut random, vocabulary)).collect();
            body["prompt"] = tokens.into();
        }
        Job { path: path.clone(), body, prompt_tokens }
    })
}

fn token(random: &mut StdRng, vocabulary: u32) -> u32 {
    if vocabulary > FIRST_TOKEN {
        random.random_range(FIRST_TOKEN..vocabulary)
    } else {
        random.random_range(0..vocabulary)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    // A GPU: 512 and 128 tokens.
    #[case(0.05, 0)]
    #[case(0.625, 0)]
    // A model of 8 billion weights on a laptop.
    #[case(1.2, 1)]
    #[case(3.0, 3)]
    #[case(60.0, MOST_HALVINGS)]
    fn sizes_suit_the_speed_of_the_server(#[case] smallest: f64, #[case] expected: u32) {
        assert_eq!(halvings(Duration::from_secs_f64(smallest), Duration::from_secs(30)), expected);
        assert_eq!(Sizes::halved(0), SIZES);
    }
}
