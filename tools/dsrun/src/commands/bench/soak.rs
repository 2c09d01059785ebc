//! `dsrun bench soak`: puts sustained load on a server and checks its answers.
//!
//! Some of the clients disconnect early. Every complete answer is compared with the solo answer, which the server gave to the same
//! question while idle.

use crate::{
    arguments::Soak,
    client::Client,
    commands::{print, print_json},
    terminal::Terminal,
};
use anyhow::{Context, Result, bail};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::Serialize;
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

/// The time limit for an answer, and for the server to become idle at the end.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);

/// The pause of a client whose request failed: a server that is gone refuses at once.
const PAUSE: Duration = Duration::from_secs(1);

/// The number of top log-probabilities to request: two give the margin.
const TOP: usize = 2;

/// The results of a run.
#[derive(Debug, Default, Serialize)]
struct Report {
    seconds: f64,
    clients: usize,
    /// Answers that were read to their end.
    answers: usize,
    /// Answers equal to the solo answer in every token.
    equal: usize,
    /// Answers whose first difference is at a token where the margin was within the tolerance.
    close_calls: usize,
    /// Answers that differ elsewhere or in their number of tokens.
    wrong: usize,
    /// Requests that failed.
    failed: usize,
    /// Requests whose client disconnected early.
    left: usize,
    tokens: usize,
    /// Pre-emptions during the run, counted by the server.
    preemptions: f64,
    /// Disconnects during the run that the server saw.
    disconnects: f64,
    /// Requests that the server cancelled during the run.
    cancelled: f64,
    /// KV blocks in use after the run, when the server is idle.
    blocks_in_use: f64,
    /// The reason why the server's counters could not be read after the run, if they could not: then they are null in JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<String>,
    /// A few examples of errors.
    examples: Vec<String>,
}

pub(crate) fn run(command: &Soak, terminal: &Terminal) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("cannot start the threads of the clients")?;
    let report = runtime.block_on(soak(command, terminal))?;
    if command.json {
        print_json(&report)?;
    } else {
        show(&report)?;
    }
    if let Some(lost) = report.lost {
        bail!("the server failed the test: {lost}, after {} failed requests", report.failed);
    }
    if report.wrong + report.failed > 0 || report.blocks_in_use > 0.0 {
        bail!(
            "the server failed the test: {} wrong answers, {} failed requests, {} KV blocks leaked",
            report.wrong,
            report.failed,
            report.blocks_in_use
        );
    }
    Ok(())
}

/// A question and its solo answer.
struct Question {
    body: Value,
    answer: Vec<Token>,
}

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
struct Token {
    /// The bytes of its text, or its id.
    name: Vec<u64>,
    log_probability: f64,
    /// The difference between the log-probabilities of the best and the second-best token.
    margin: f64,
}

impl Token {
    /// The tokens of an event of `/v1/chat/completions`.
    fn of_chat(choice: &Value) -> Result<Vec<Self>> {
        let content = choice["logprobs"]["content"].as_array().into_iter().flatten();
        let one = |token: &Value| {
            let bytes = token["bytes"].as_array().into_iter().flatten();
            let tops = token["top_logprobs"].as_array().into_iter().flatten();
            let tops = tops.filter_map(|top| top["logprob"].as_f64());
            Self::new(bytes.filter_map(Value::as_u64).collect(), &token["logprob"], tops)
        };
        content.map(one).collect()
    }

    /// The tokens of an event of `/v1/completions`.
    fn of_completion(choice: &Value) -> Result<Vec<Self>> {
        let logs = &choice["logprobs"];
        let ids = choice["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64);
        let one = |(index, id)| {
            let tops = logs["top_logprobs"][index].as_object().into_iter().flatten();
            let tops = tops.filter_map(|(_, log)| log.as_f64());
            Self::new(vec![id], &logs["token_logprobs"][index], tops)
        };
        ids.enumerate().map(one).collect()
    }

    fn new(name: Vec<u64>, log_probability: &Value, tops: impl Iterator<Item = f64>) -> Result<Self> {
        let mut tops: Vec<f64> = tops.collect();
        tops.sort_by(|a, b| b.total_cmp(a));
        let log_probability = log_probability.as_f64().context("a token has no log-probability")?;
        let &[best, next, ..] = &tops[..] else { bail!("the answer has no top log-probabilities") };
        Ok(Self { name, log_probability, margin: best - next })
    }
}

/// What counts as the same answer.
#[derive(Clone, Copy, Debug)]
enum Equality {
    /// The same tokens with the same log-probabilities.
    Bits,
    /// The same tokens up to one whose margin is within this tolerance.
    Tokens(f64),
}

async fn soak(command: &Soak, terminal: &Terminal) -> Result<Report> {
    let client = Client::new(&command.url, command.api_key.clone())?;
    let models = client.json("/v1/models").await?;
    let model = models.pointer("/data/0/id").and_then(Value::as_str).context("the server lists no models")?;
    terminal.note(&format!("asking {} questions, one by one", command.questions));
    let mut random = StdRng::seed_from_u64(command.seed);
    let mut questions = Vec::new();
    for number in 0..command.questions {
        let body = question(model, command, number, &mut random);
        let answer = timeout(ANSWER_TIMEOUT, ask(&client, &body, usize::MAX))
            .await
            .context("no answer within the time limit")??;
        if answer.len() != body["max_tokens"].as_u64().unwrap_or(0) as usize {
            bail!("a solo answer has {} tokens instead of {}", answer.len(), body["max_tokens"]);
        }
        questions.push(Question { body, answer });
    }
    let questions = Arc::new(questions);

    terminal.note(&format!("{} clients for {} s", command.clients, command.seconds));
    let before = Counts::read(&client).await?;
    let start = Instant::now();
    let end = start + Duration::from_secs(command.seconds);
    let mut tasks = JoinSet::new();
    for number in 0..command.clients {
        let (client, questions) = (client.clone(), questions.clone());
        let random = StdRng::seed_from_u64(command.seed ^ (number as u64 + 1) << 32);
        let leave = command.leave;
        let equality = if command.bits { Equality::Bits } else { Equality::Tokens(command.tolerance) };
        tasks.spawn(async move { converse(&client, &questions, random, leave, equality, end).await });
    }
    let mut report = Report { clients: command.clients, ..Report::default() };
    while let Some(part) = tasks.join_next().await {
        report.add(part.context("a client failed")?);
    }
    report.seconds = start.elapsed().as_secs_f64();
    match idle(&client).await {
        Ok(after) => {
            report.preemptions = after.preemptions - before.preemptions;
            report.disconnects = after.disconnects - before.disconnects;
            report.cancelled = after.cancelled - before.cancelled;
            report.blocks_in_use = after.blocks_in_use;
        }
        // What clients saw until then is reported all the same, and the counters as unknown.
        Err(error) => {
            report.lost = Some(format!("{error:#}"));
            (report.preemptions, report.disconnects) = (f64::NAN, f64::NAN);
            (report.cancelled, report.blocks_in_use) = (f64::NAN, f64::NAN);
        }
    }
    Ok(report)
}

fn question(model: &str, command: &Soak, number: usize, random: &mut StdRng) -> Value {
    let length = command.prompt.draw(random);
    let mut body = json!({
        "model": model,
        "max_tokens": command.generate.draw(random),
        "temperature": if command.bits { number % 2 } else { 0 },
        "seed": number,
        "ignore_eos": true,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    if command.token_ids {
        let ids = (0..length).map(|_| random.random_range(0..command.vocabulary));
        body["prompt"] = ids.collect::<Vec<u32>>().into();
        body["logprobs"] = TOP.into();
        body["return_token_ids"] = true.into();
    } else {
        body["messages"] = json!([{"role": "user", "content": super::prompts::words(random, length)}]);
        body["logprobs"] = true.into();
        body["top_logprobs"] = TOP.into();
    }
    body
}

/// Runs one client, which asks questions until the end and disconnects early at random.
async fn converse(
    client: &Client,
    questions: &[Question],
    mut random: StdRng,
    leave: f64,
    equality: Equality,
    end: Instant,
) -> Report {
    let mut report = Report::default();
    while Instant::now() < end {
        let question = &questions[random.random_range(0..questions.len())];
        let leaves = random.random_bool(leave);
        let max_tokens = if leaves { random.random_range(0..=question.answer.len()) } else { usize::MAX };
        match timeout(ANSWER_TIMEOUT, ask(client, &question.body, max_tokens)).await {
            Ok(Ok(tokens)) if leaves => {
                report.left += 1;
                report.tokens += tokens.len();
            }
            Ok(Ok(tokens)) => {
                report.tokens += tokens.len();
                report.compare(&question.answer, &tokens, equality);
            }
            Ok(Err(error)) => {
                report.fail(format!("{error:#}"));
                sleep(PAUSE).await;
            }
            Err(_) => report.fail("no answer within the time limit".to_owned()),
        }
    }
    report
}

/// Asks a question and returns the tokens of the answer. The client disconnects after `max_tokens` tokens.
async fn ask(client: &Client, body: &Value, max_tokens: usize) -> Result<Vec<Token>> {
    let of_chat = body.get("messages").is_some();
    let path = if of_chat { "/v1/chat/completions" } else { "/v1/completions" };
    let mut events = client.stream(path, body).await?;
    let mut tokens = Vec::new();
    let mut counted = None;
    while tokens.len() < max_tokens {
        let Some(event) = events.next().await? else {
            if counted.as_ref() != Some(&body["max_tokens"]) {
                bail!("the usage has {counted:?} tokens instead of {}", body["max_tokens"]);
            }
            break;
        };
        counted = event.pointer("/usage/completion_tokens").cloned().or(counted);
        let choice = &event["choices"][0];
        tokens.extend(if of_chat { Token::of_chat(choice)? } else { Token::of_completion(choice)? });
    }
    Ok(tokens)
}

impl Report {
    fn compare(&mut self, solo: &[Token], answer: &[Token], equality: Equality) {
        self.answers += 1;
        let differ = |(solo, token): (&Token, &Token)| {
            let bits = matches!(equality, Equality::Bits);
            solo.name != token.name || (bits && solo.log_probability != token.log_probability)
        };
        let differs = solo.iter().zip(answer).position(differ);
        let is_close =
            |index: usize| matches!(equality, Equality::Tokens(most) if solo[index].margin <= most);
        match differs {
            None if solo.len() == answer.len() => self.equal += 1,
            // After a close call the texts diverge, but their lengths are equal.
            Some(index) if is_close(index) && solo.len() == answer.len() => self.close_calls += 1,
            _ => {
                self.wrong += 1;
                let place = differs.map_or("none".to_owned(), |index| {
                    let (alone, here) = (solo[index].log_probability, answer[index].log_probability);
                    format!(
                        "{index}, log-probability {here} instead of {alone}, margin {}",
                        solo[index].margin
                    )
                });
                self.example(format!(
                    "{} tokens instead of {}, first difference: {place}",
                    answer.len(),
                    solo.len()
                ));
            }
        }
    }

    fn fail(&mut self, message: String) {
        self.failed += 1;
        self.example(message);
    }

    fn example(&mut self, example: String) {
        if self.examples.len() < 10 {
            self.examples.push(example);
        }
    }

    fn add(&mut self, part: Self) {
        self.answers += part.answers;
        self.equal += part.equal;
        self.close_calls += part.close_calls;
        self.wrong += part.wrong;
        self.failed += part.failed;
        self.left += part.left;
        self.tokens += part.tokens;
        part.examples.into_iter().for_each(|example| self.example(example));
    }
}

/// The counters of the server.
struct Counts {
    preemptions: f64,
    disconnects: f64,
    cancelled: f64,
    running: f64,
    waiting: f64,
    blocks_in_use: f64,
}

impl Counts {
    async fn read(client: &Client) -> Result<Self> {
        let text = client.text("/metrics").await?;
        let number = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            value
                .with_context(|| format!("/metrics lacks {name}"))?
                .parse()
                .context("a metric is not a number")
        };
        Ok(Self {
            preemptions: number("dsrun_preemptions_total")?,
            disconnects: number("dsrun_disconnects_total")?,
            cancelled: number("dsrun_cancelled_total")?,
            running: number("dsrun_requests_running")?,
            waiting: number("dsrun_requests_waiting")?,
            blocks_in_use: number("dsrun_kv_blocks_in_use")?,
        })
    }
}

/// Waits until the server is idle, and reads its counters.
async fn idle(client: &Client) -> Result<Counts> {
    let wait = async {
        loop {
            let counts = Counts::read(client).await?;
            if counts.running + counts.waiting == 0.0 {
                return Ok(counts);
            }
            sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(ANSWER_TIMEOUT, wait).await.context("the server does not become idle")?
}

fn show(report: &Report) -> Result<()> {
    print(&format!("{} clients for {:.1} s, {} tokens", report.clients, report.seconds, report.tokens))?;
    print(&format!(
        "answers      {}: {} equal to solo, {} equal up to a close call, {} wrong, {} failed",
        report.answers, report.equal, report.close_calls, report.wrong, report.failed
    ))?;
    if report.lost.is_some() {
        print(&format!("disconnects  {}", report.left))?;
    } else {
        print(&format!(
            "disconnects  {} ({} seen by the server, {} cancelled)",
            report.left, report.disconnects, report.cancelled
        ))?;
        print(&format!("pre-emptions {}", report.preemptions))?;
        print(&format!("KV blocks in use afterwards: {}", report.blocks_in_use))?;
    }
    report.examples.iter().try_for_each(|example| print(&format!("  {example}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str, margin: f64) -> Vec<Token> {
        let token = |byte| Token { name: vec![u64::from(byte)], log_probability: -margin, margin };
        text.bytes().map(token).collect()
    }

    #[test]
    fn a_difference_is_a_close_call_only_where_the_margin_is_small() {
        let mut report = Report::default();
        let mut compare = |solo: &[Token], answer: &[Token]| {
            report.compare(solo, answer, Equality::Tokens(0.1));
        };
        compare(&tokens("abc", 1.0), &tokens("abc", 0.9));
        compare(&tokens("abc", 0.05), &tokens("abx", 1.0));
        compare(&tokens("abc", 1.0), &tokens("abx", 1.0));
        compare(&tokens("abc", 1.0), &tokens("ab", 1.0));
        compare(&tokens("abc", 0.05), &tokens("abcc", 1.0));
        compare(&tokens("abc", 0.05), &tokens("ax", 1.0));
        assert_eq!((report.equal, report.close_calls, report.wrong), (1, 1, 4));
        assert_eq!(report.examples.len(), 4);
    }

    #[test]
    fn bits_have_no_close_calls() {
        let mut report = Report::default();
        report.compare(&tokens("abc", 0.01), &tokens("abc", 0.01), Equality::Bits);
        report.compare(&tokens("abc", 0.01), &tokens("abc", 0.02), Equality::Bits);
        report.compare(&tokens("abc", 0.01), &tokens("abx", 0.01), Equality::Bits);
        assert_eq!((report.equal, report.close_calls, report.wrong), (1, 0, 2));
    }

    #[test]
    fn events_of_both_endpoints_have_tokens() {
        let chat = json!({"logprobs": {"content": [
            {"bytes": [97, 98], "logprob": -0.5, "top_logprobs": [{"logprob": -0.5}, {"logprob": -1.5}]},
        ]}});
        let expected = Token { name: vec![97, 98], log_probability: -0.5, margin: 1.0 };
        assert_eq!(Token::of_chat(&chat).unwrap(), [expected]);
        let completion = json!({"token_ids": [7], "logprobs": {
            "token_logprobs": [-3.0], "top_logprobs": [{"x": -1.5, "y": -0.5, "z": -3.0}],
        }});
        let expected = Token { name: vec![7], log_probability: -3.0, margin: 1.0 };
        assert_eq!(Token::of_completion(&completion).unwrap(), [expected]);
        assert!(Token::of_completion(&json!({"token_ids": [7]})).is_err());
        assert!(Token::of_chat(&json!({"delta": {"role": "assistant"}})).unwrap().is_empty());
    }
}
