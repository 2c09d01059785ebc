//! Puts load on a server and records the outcome of each request.

use crate::client::Client;
use anyhow::Result;
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::Value;
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{task::JoinSet, time::Instant};

/// The arrival process of the requests.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Arrivals {
    /// Open loop: requests arrive at random at a mean rate, however many are still running.
    Poisson {
        /// Requests per second.
        rate: f64,
        /// The seed of the times between requests.
        seed: u64,
    },
    /// Closed loop: a number of clients, each of which sends its next request after its answer.
    Clients(usize),
}

impl fmt::Display for Arrivals {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Poisson { rate, .. } => write!(formatter, "{rate} requests/s"),
            Self::Clients(1) => write!(formatter, "1 client"),
            Self::Clients(clients) => write!(formatter, "{clients} clients"),
        }
    }
}

/// A request to send.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) path: Arc<str>,
    pub(super) body: Value,
    /// Tokens of the prompt, used if the server does not report them.
    pub(super) prompt_tokens: usize,
}

/// The outcome of a request.
#[derive(Clone, Debug)]
pub(super) struct Record {
    /// Seconds from the start of the load to the due time of the request.
    pub(super) due: f64,
    pub(super) outcome: Result<Answered, String>,
}

/// An answer, with times in seconds from the due time of the request.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answered {
    pub(super) prompt_tokens: usize,
    pub(super) tokens: usize,
    /// The arrival time of each piece of text, which is usually one token.
    pub(super) pieces: Vec<f64>,
    pub(super) end: f64,
}

/// The end of a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Extent {
    /// A number of requests.
    Requests(usize),
    /// A time. Clients ask as long as they expect their answer within it, by the time that the last one took, and at least once.
    Time(Duration),
}

impl Extent {
    /// The number of requests, if it does not depend on the answers.
    fn requests(self, arrivals: &Arrivals) -> Option<usize> {
        match (self, arrivals) {
            (Self::Requests(count), _) => Some(count),
            (Self::Time(time), Arrivals::Poisson { rate, .. }) => {
                Some((rate * time.as_secs_f64()).ceil().max(1.0) as usize)
            }
            (Self::Time(_), Arrivals::Clients(_)) => None,
        }
    }
}

/// Sends requests and waits for all answers.
pub(super) async fn run_load(
    client: &Client,
    jobs: impl Iterator<Item = Job> + Send + 'static,
    arrivals: &Arrivals,
    extent: Extent,
    timeout: Duration,
) -> Vec<Record> {
    let jobs = jobs.take(extent.requests(arrivals).unwrap_or(usize::MAX));
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    match arrivals {
        Arrivals::Poisson { rate, seed } => {
            let mut random = StdRng::seed_from_u64(*seed);
            let mut due = start;
            for job in jobs {
                let client = client.clone();
                // Times count from the due time, even if the request is sent late.
                tasks.spawn(async move {
                    tokio::time::sleep_until(due).await;
                    vec![answer(&client, job, start, due, timeout).await]
                });
                let gap = -(1.0 - random.random::<f64>()).ln() / rate;
                due += Duration::from_secs_f64(gap);
            }
        }
        Arrivals::Clients(clients) => {
            let jobs = Arc::new(Mutex::new(jobs));
            let time = match extent {
                Extent::Requests(_) => Duration::MAX,
                Extent::Time(time) => time,
            };
            for _ in 0..*clients {
                let (client, jobs) = (client.clone(), jobs.clone());
                let next = move || jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
                tasks.spawn(async move {
                    let mut records = Vec::new();
                    let mut last = Duration::ZERO;
                    while records.is_empty() || start.elapsed().saturating_add(last) < time {
                        let Some(job) = next() else { break };
                        let asked = Instant::now();
                        records.push(answer(&client, job, start, asked, timeout).await);
                        last = asked.elapsed();
                    }
                    records
                });
            }
        }
    }
    tasks.join_all().await.into_iter().flatten().collect()
}

async fn answer(client: &Client, job: Job, start: Instant, due: Instant, timeout: Duration) -> Record {
    let outcome = match tokio::time::timeout(timeout, ask(client, job, due)).await {
        Ok(Ok(answered)) => Ok(answered),
        Ok(Err(error)) => Err(format!("{error:#}")),
        Err(_) => Err(format!("no answer within {} s", timeout.as_secs())),
    };
    Record { due: due.duration_since(start).as_secs_f64(), outcome }
}

async fn ask(client: &Client, job: Job, due: Instant) -> Result<Answered> {
    let mut events = client.stream(&job.path, &job.body).await?;
    let mut answered = Answered { prompt_tokens: job.prompt_tokens, tokens: 0, pieces: Vec::new(), end: 0.0 };
    let mut counted = None;
    while let Some(event) = events.next().await? {
        if has_text(&event) {
            answered.pieces.push(due.elapsed().as_secs_f64());
        }
        let count = |name: &str| event["usage"][name].as_u64().map(|count| count as usize);
        counted = count("completion_tokens").or(counted);
        answered.prompt_tokens = count("prompt_tokens").unwrap_or(answered.prompt_tokens);
    }
    answered.tokens = counted.unwrap_or(answered.pieces.len());
    answered.end = due.elapsed().as_secs_f64();
    Ok(answered)
}

/// Whether an event of either endpoint contains text or tokens.
fn has_text(event: &Value) -> bool {
    let choice = &event["choices"][0];
    if choice["token_ids"].as_array().is_some_and(|ids| !ids.is_empty()) {
        return true;
    }
    let texts = [&choice["text"], &choice["delta"]["content"], &choice["delta"]["reasoning_content"]];
    texts.iter().any(|text| text.as_str().is_some_and(|text| !text.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_number_of_requests_follows_from_rate_and_time() {
        let time = Extent::Time(Duration::from_secs(30));
        let arrivals = |rate| Arrivals::Poisson { rate, seed: 0 };
        assert_eq!(time.requests(&arrivals(2.5)), Some(75));
        assert_eq!(time.requests(&arrivals(0.001)), Some(1));
        assert_eq!(time.requests(&Arrivals::Clients(8)), None);
        assert_eq!(Extent::Requests(5).requests(&Arrivals::Clients(8)), Some(5));
    }

    #[test]
    fn text_is_found_in_both_kinds_of_events() {
        assert!(has_text(&json!({"choices": [{"text": "a"}]})));
        assert!(has_text(&json!({"choices": [{"delta": {"content": "a"}}]})));
        assert!(has_text(&json!({"choices": [{"text": "", "token_ids": [7]}]})));
        assert!(!has_text(&json!({"choices": [{"text": "", "token_ids": []}]})));
        assert!(!has_text(&json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]})));
        assert!(!has_text(&json!({"choices": [], "usage": {"completion_tokens": 3}})));
    }
}
