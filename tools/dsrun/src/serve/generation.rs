//! From a checked request to the pieces of its answers.

use super::{
    api::{Finish, Generation, Usage},
    app::{App, Loaded, SamplingDefaults},
    budget::Held,
    error::ApiError,
    grammar::Grammar,
    metrics::OpenAnswer,
    replicas::MovingStream,
    text::{AnswerText, Token},
    traces::{ChoiceTrace, RequestTrace},
};
use dsrun_engine::{EngineError, FinishReason, Request, SamplingOptions};
use dsrun_models::stop::StopMatcher;
use futures_util::{
    StreamExt,
    stream::{self, BoxStream, SelectAll},
};
use std::{sync::Arc, time::Instant};
use tokio::time::timeout_at;

/// The most answers to one request.
pub(crate) const MAX_CHOICES: usize = 128;
/// The most stop strings.
const MAX_STOPS: usize = 16;
/// The most tokens that end an answer.
const MAX_STOP_TOKENS: usize = 128;
/// The most bytes of a salt of cached prefixes.
const MAX_SALT_BYTES: usize = 1024;
/// The most bytes of a stop string.
const MAX_STOP_BYTES: usize = 1024;
/// The most top tokens that are reported with each token.
pub(crate) const MAX_TOP: usize = 20;
/// The largest bias of a token's logit.
const MAX_BIAS: f32 = 100.0;

/// The answers to generate for a request.
pub(crate) struct Job {
    pub(crate) prompts: Vec<Vec<u32>>,
    pub(crate) generation: Generation,
    pub(crate) max_tokens: Option<usize>,
    /// The number of top tokens to report with each token and its probability; `None` to report no tokens.
    pub(crate) logprobs: Option<usize>,
    pub(crate) grammar: Option<Grammar>,
    /// Control tokens that are part of the text, with their texts.
    pub(crate) shown: Arc<[(u32, String)]>,
}

impl Generation {
    /// Checks the fields whose range does not depend on the model.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        if !(1..=MAX_CHOICES).contains(&self.n) {
            return Err(ApiError::field("n", format!("must be from 1 to {MAX_CHOICES}")));
        }
        if self.include_usage && !self.stream {
            return Err(ApiError::field("stream_options", "only together with stream"));
        }
        if self.stop.len() > MAX_STOPS {
            return Err(ApiError::field("stop", format!("at most {MAX_STOPS} texts")));
        }
        if let Some(salt) = &self.cache_salt
            && !(1..=MAX_SALT_BYTES).contains(&salt.len())
        {
            let message = format!("has {} bytes, but must have from 1 to {MAX_SALT_BYTES}", salt.len());
            return Err(ApiError::field("cache_salt", message));
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(ApiError::field("stop", "a stop text must not be empty"));
        }
        if self.stop_token_ids.len() > MAX_STOP_TOKENS {
            return Err(ApiError::field("stop_token_ids", format!("at most {MAX_STOP_TOKENS} tokens")));
        }
        if let Some(long) = self.stop.iter().map(String::len).find(|bytes| *bytes > MAX_STOP_BYTES) {
            let message = format!("a stop text has {long} bytes, but may have at most {MAX_STOP_BYTES}");
            return Err(ApiError::field("stop", message));
        }
        Ok(())
    }

    /// The sampling options: those of the request, else the defaults of the model.
    fn sampling(&self, defaults: &SamplingDefaults, seed: u64) -> Result<SamplingOptions, ApiError> {
        let chosen = self.temperature.is_some()
            || self.top_k.is_some()
            || self.top_p.is_some()
            || self.min_p.is_some();
        let defaults = if chosen { &defaults.chosen } else { &defaults.unchosen };
        let top_k = match self.top_k {
            None => defaults.top_k,
            Some(-1) => 0,
            Some(top_k) => {
                u32::try_from(top_k).map_err(|_| ApiError::field("top_k", "must be -1, 0 or more"))?
            }
        };
        let sampling = SamplingOptions {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k,
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            seed,
        };
        sampling.validate().map_err(|error| ApiError::from_engine(&error))?;
        Ok(sampling)
    }

    /// The biases of a model of so many tokens.
    fn logit_bias(&self, vocabulary: usize) -> Result<Arc<[(u32, f32)]>, ApiError> {
        let count = self.logit_bias.len();
        if count > vocabulary {
            let message = format!("has {count} tokens, but the model has {vocabulary}");
            return Err(ApiError::field("logit_bias", message));
        }
        let bias = |(token, bias): (&String, &f32)| {
            let field = || format!("logit_bias.{token}");
            let id: u32 = token.parse().map_err(|_| ApiError::field(field(), "must be a token id"))?;
            if id as usize >= vocabulary {
                let message = format!("there is no such token: the vocabulary has {vocabulary}");
                return Err(ApiError::field(field(), message));
            }
            if bias.abs() > MAX_BIAS || bias.is_nan() {
                return Err(ApiError::field(field(), format!("must be from -{MAX_BIAS} to {MAX_BIAS}")));
            }
            Ok((id, *bias))
        };
        self.logit_bias.iter().map(bias).collect()
    }
}

impl Job {
    /// The number of answers.
    pub(crate) fn choices(&self) -> usize {
        self.prompts.len() * self.generation.n
    }

    /// One request to the engine for each choice: those of the first prompt, then those of the second, and so on; and the bytes that
    /// they share.
    fn requests(&self, loaded: &Loaded) -> Result<(Vec<Request>, Held), ApiError> {
        let generation = &self.generation;
        if self.choices() > MAX_CHOICES {
            return Err(ApiError::field("n", format!("at most {MAX_CHOICES} answers, over all prompts")));
        }
        let context = loaded.engine.limits().context;
        if let Some(asked) = self.max_tokens.filter(|asked| *asked > context) {
            let message = format!(
                "{asked} tokens were asked for, but prompt and answer together have at most {context}"
            );
            return Err(ApiError::field("max_tokens", message));
        }
        // The sign does not matter: every number is a seed.
        let seed = generation.seed.map_or_else(rand::random, i64::cast_unsigned);
        let vocabulary = loaded.engine.limits().vocabulary;
        let logit_bias = generation.logit_bias(vocabulary)?;
        let held = loaded.biases.hold(size_of_val(&*logit_bias)).ok_or_else(ApiError::queue_full)?;
        if let Some(token) = generation.stop_token_ids.iter().find(|token| **token as usize >= vocabulary) {
            let message = format!("there is no token {token}: the model has {vocabulary}");
            return Err(ApiError::field("stop_token_ids", message));
        }
        let choice = |prompt: &Vec<u32>, choice: usize| {
            Ok(Request {
                prompt: prompt.clone(),
                sampling: generation.sampling(&loaded.sampling, seed.wrapping_add(choice as u64))?,
                max_tokens: self.max_tokens,
                min_tokens: generation.min_tokens,
                stop_ids: generation.stop_token_ids.clone(),
                ignore_end: generation.ignore_eos,
                logit_bias: logit_bias.clone(),
                top_log_probabilities: self.logprobs.unwrap_or(0),
                priority: generation.priority,
                cache_salt: generation.cache_salt.clone(),
                constraint: self.grammar.as_ref().map(Grammar::constraint),
            })
        };
        // Whatever is wrong with a prompt is found before the prompt is copied for every choice.
        for prompt in &self.prompts {
            let request = choice(prompt, 0)?;
            loaded.engine.limits().check(&request).map_err(|error| ApiError::from_engine(&error))?;
        }
        let choices =
            self.prompts.iter().flat_map(|prompt| (0..generation.n).map(move |index| (prompt, index)));
        let requests = choices.map(|(prompt, index)| choice(prompt, index)).collect::<Result<_, _>>()?;
        Ok((requests, held))
    }

    /// Submits the job to the engine. If a request is refused, all of them are cancelled.
    ///
    /// # Errors
    /// If a request is wrong or refused.
    pub(crate) fn submit(self, app: &Arc<App>, loaded: &Loaded) -> Result<Answers, ApiError> {
        let started = Instant::now();
        let (requests, held) = self.requests(loaded)?;
        let request_trace = RequestTrace::current();
        self.describe(&request_trace);
        let tokenizer = loaded.model.tokenizer();
        let stops = StopMatcher::new(&self.generation.stop);
        let ends = [loaded.engine.stop_ids(), &self.generation.stop_token_ids].concat();
        let ends: Arc<[u32]> = ends.into();
        let mut choices = Vec::new();
        for (index, request) in requests.into_iter().enumerate() {
            let tokens = loaded.engine.submit(request).map_err(|error| app.refused(&error))?;
            let (min_tokens, shown) = (self.generation.min_tokens, self.shown.clone());
            let text = AnswerText::new(tokenizer, stops.clone(), min_tokens, shown, self.logprobs.is_some());
            let (ends, trace) = (ends.clone(), ChoiceTrace::new(request_trace.clone(), index));
            choices.push(Choice { index, tokens, text, ends, last: None, ended: false, trace });
        }
        let answer = OpenAnswer::new(app.metrics.clone());
        let shared = app.clone();
        let pieces = choices.into_iter().map(|choice| {
            let app = shared.clone();
            let next = move |mut choice: Choice| {
                let app = app.clone();
                async move { choice.next(&app, started).await.map(|piece| (piece, choice)) }
            };
            stream::unfold(choice, next).boxed()
        });
        Ok(Answers {
            open: stream::select_all(pieces),
            prompt_tokens: self.prompts.iter().map(Vec::len).sum(),
            choices_per_prompt: self.generation.n,
            cached_tokens: 0,
            tokens: 0,
            started,
            answer,
            finishes: Vec::new(),
            trace: request_trace,
            app: app.clone(),
            _held: held,
        })
    }

    /// Sets the attributes of a request's trace that the request decides.
    fn describe(&self, trace: &RequestTrace) {
        let generation = &self.generation;
        let integer = |value: usize| i64::try_from(value).ok();
        trace.set("gen_ai.request.max_tokens", self.max_tokens.and_then(integer));
        trace.set("gen_ai.request.choice.count", integer(generation.n).filter(|count| *count != 1));
        trace.set("gen_ai.request.temperature", generation.temperature.map(f64::from));
        trace.set("gen_ai.request.top_p", generation.top_p.map(f64::from));
        trace.set("gen_ai.request.top_k", generation.top_k);
        trace.set("gen_ai.request.frequency_penalty", generation.frequency_penalty.map(f64::from));
        trace.set("gen_ai.request.presence_penalty", generation.presence_penalty.map(f64::from));
        trace.set("gen_ai.request.seed", generation.seed);
    }
}

/// One answer while it is generated.
struct Choice {
    index: usize,
    tokens: MovingStream,
    text: AnswerText,
    /// Tokens that end an answer and are no part of it.
    ends: Arc<[u32]>,
    /// The time of the last token.
    last: Option<Instant>,
    ended: bool,
    trace: ChoiceTrace,
}

/// A piece of an answer: the result of one token. It may have no text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Piece {
    /// The index of the choice.
    pub(crate) index: usize,
    /// The token, unless it is an end token.
    pub(crate) id: Option<u32>,
    /// The number of prompt tokens that were found in the cache; 0 but for the first piece of a choice.
    pub(crate) cached: usize,
    pub(crate) text: String,
    /// The tokens of the text, if they were asked for.
    pub(crate) tokens: Vec<Token>,
    /// The index of the stop string that ended the answer, if one did.
    pub(crate) stop: Option<usize>,
    /// The reason why the answer ended, set on its last piece.
    pub(crate) finish: Option<Finish>,
}

impl Piece {
    /// The bytes that it adds to a complete answer.
    pub(crate) fn bytes(&self) -> usize {
        self.text.len() + self.tokens.iter().map(Token::bytes).sum::<usize>()
    }
}

impl Choice {
    async fn next(&mut self, app: &App, started: Instant) -> Option<Result<Piece, ApiError>> {
        if self.ended {
            return None;
        }
        let event = match self.tokens.next(app.engine()?).await? {
            Ok(event) => event,
            Err(error) => {
                self.ended = true;
                return Some(Err(app.refused(&error)));
            }
        };
        let now = Instant::now();
        self.trace.token(now);
        let cached = if self.last.is_none() { event.cached } else { 0 };
        match self.last.replace(now) {
            None => app.metrics.first_token.record(now - started),
            Some(last) => app.metrics.per_token.record(now - last),
        }
        let ends = event.finish == Some(FinishReason::Stop) && self.ends.contains(&event.token);
        let output = self.text.push(&event, !ends);
        let finish = match output.finish {
            Some(FinishReason::Stop) => Some(Finish::Stop),
            Some(FinishReason::Length) => Some(Finish::Length),
            // The server cancels by dropping the stream, so this is not expected.
            Some(FinishReason::Cancelled) => {
                self.ended = true;
                return Some(Err(ApiError::not_ready("the request was cancelled")));
            }
            None => None,
        };
        self.ended = finish.is_some();
        let id = (!ends).then_some(event.token);
        let (index, stop) = (self.index, output.stop);
        Some(Ok(Piece { index, id, cached, text: output.text, tokens: output.tokens, stop, finish }))
    }
}

impl Drop for Choice {
    fn drop(&mut self) {
        self.trace.begin(self.tokens.begun());
    }
}

/// All answers to a request while they are generated. Dropping them cancels those that still run.
pub(crate) struct Answers {
    /// The bytes that its requests share.
    _held: Held,
    open: SelectAll<BoxStream<'static, Result<Piece, ApiError>>>,
    prompt_tokens: usize,
    choices_per_prompt: usize,
    /// Prompt tokens that were found in the cache, once for each prompt.
    cached_tokens: usize,
    tokens: usize,
    started: Instant,
    answer: OpenAnswer,
    /// The reasons why choices ended, of those that have.
    finishes: Vec<Finish>,
    trace: RequestTrace,
    app: Arc<App>,
}

impl Answers {
    /// The next piece of any answer; `None` once all are complete.
    ///
    /// # Errors
    /// If the engine failed, or the time limit is over. After an error there are no more pieces.
    pub(crate) async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        if self.answer.has_ended() {
            return None;
        }
        let limit = self.app.answer_timeout;
        let end = self.started + limit;
        // Pieces that wait for a client that reads slowly are ready, whatever the time.
        let piece = match Instant::now() < end {
            true => timeout_at(end.into(), self.open.next()).await.ok(),
            false => None,
        };
        let piece = piece.unwrap_or_else(|| Some(Err(ApiError::too_slow(limit))));
        match &piece {
            Some(Ok(piece)) => {
                self.tokens += 1;
                self.finishes.extend(piece.finish);
                if piece.index % self.choices_per_prompt == 0 {
                    self.cached_tokens += piece.cached;
                }
            }
            Some(Err(error)) => {
                self.trace.fail(error.kind(), error.status().is_server_error());
                self.answer.end();
                self.open.clear();
            }
            None => {
                self.answer.end();
                self.app.metrics.answer.record(self.started.elapsed());
            }
        }
        piece
    }

    /// The tokens used so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage::new(self.prompt_tokens, self.cached_tokens, self.tokens)
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        let usage = self.usage();
        let count = |tokens: usize| i64::try_from(tokens).ok();
        self.trace.set("gen_ai.usage.input_tokens", count(usage.prompt_tokens));
        let cached = usage.prompt_tokens_details.cached_tokens;
        self.trace.set("gen_ai.usage.cache_read.input_tokens", count(cached));
        self.trace.set("gen_ai.usage.output_tokens", count(usage.completion_tokens));
        let reasons = self.finishes.iter().map(|finish| finish.name()).collect();
        self.trace.set_list("gen_ai.response.finish_reasons", reasons);
        if !self.answer.has_ended() {
            self.trace.fail("client_disconnected", false);
        }
    }
}

impl ApiError {
    /// The answer to a client about an error of the engine that concerns its request.
    pub(crate) fn from_engine(error: &EngineError) -> Self {
        match error {
            // Options are named as on the command line, fields with underscores.
            EngineError::Option { option, value, rule } if *option != "kv-tokens" => {
                Self::field(option.replace('-', "_"), format!("{value}: {rule}"))
            }
            EngineError::Option { .. }
            | EngineError::EmptyPrompt
            | EngineError::Missing { .. }
            | EngineError::Constraint(_) => Self::malformed(error.to_string()),
            EngineError::NoSuchToken { .. } => Self::field("prompt", error.to_string()),
            EngineError::PromptTooLong { .. } => {
                Self::malformed(error.to_string()).code("context_length_exceeded")
            }
            error => {
                tracing::error!(%error, "a request failed");
                Self::internal()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{arguments::SamplingArguments, serve::api::chat::ChatRequest, session::generate_options};
    use dsrun_core::{DType, WeightFormat};
    use dsrun_models::model::Model;
    use rstest::rstest;
    use serde_json::json;
    use std::{fs, path::Path};

    /// The sampling options of the server and of `generate` and `chat`, for requests that give a temperature or nothing.
    fn of_server_and_command_line(model: &Model, temperature: Option<f32>) -> [SamplingOptions; 2] {
        let request = json!({"messages": [], "temperature": temperature});
        let request: ChatRequest = serde_json::from_value(request).expect("a request");
        let generation = request.generation().expect("it is valid");
        let arguments = SamplingArguments { temperature, ..SamplingArguments::default() };
        [
            generation.sampling(&SamplingDefaults::of(model), arguments.seed).expect("it is valid"),
            generate_options(model, &arguments).expect("it is valid").sampling,
        ]
    }

    #[rstest]
    #[case::small("llama-3b", (0.6, 0.95, 0.1))]
    #[case::large("llama-8b", (0.8, 0.95, 0.05))]
    fn the_server_and_the_command_line_have_the_defaults_of_the_size(
        #[case] preset: &str,
        #[case] expected: (f32, f32, f32),
    ) {
        let model = Model::random_named(preset, 0, WeightFormat::Dense(DType::BF16)).expect("a preset");
        let [server, command_line] = of_server_and_command_line(&model, None);
        assert_eq!(server, command_line);
        assert_eq!((server.temperature, server.top_p, server.min_p), expected);
        let [server, command_line] = of_server_and_command_line(&model, Some(0.7));
        assert_eq!(server, command_line);
        assert_eq!((server.temperature, server.top_p, server.min_p), (0.7, 1.0, 0.0));
    }

    /// The embedding has 2,000 weights a token, and everything else about 16 million.
    #[rstest]
    #[case::below(1_990_000, (0.6, 0.1))]
    #[case::above(2_000_000, (0.8, 0.05))]
    fn the_size_that_decides_is_4_billion_parameters(
        #[case] vocabulary: usize,
        #[case] expected: (f32, f32),
    ) {
        let config = json!({
            "model_type": "llama", "vocab_size": vocabulary, "hidden_size": 2000, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 10, "num_key_value_heads": 10, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 128, "tie_word_embeddings": true,
        });
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("config.json");
        fs::write(&path, config.to_string()).expect("it is written");
        let name = path.to_str().expect("a name");
        let model = Model::random_named(name, 0, WeightFormat::Dense(DType::BF16)).expect("a configuration");
        let [server, command_line] = of_server_and_command_line(&model, None);
        assert_eq!(server, command_line);
        assert_eq!((server.temperature, server.min_p), expected);
    }

    #[rstest]
    #[case::sampled(json!({"temperature": 0.3, "top_k": 7, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.5}))]
    #[case::partly(json!({"top_k": 7}))]
    #[case::greedy(json!({"do_sample": false, "repetition_penalty": 1.5}))]
    #[case::silent(json!({"repetition_penalty": 1.5}))]
    fn the_server_and_the_command_line_have_the_defaults_of_the_model(#[case] config: serde_json::Value) {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tests/fixtures/llama3");
        let folder = tempfile::tempdir().expect("a folder");
        for file in fs::read_dir(fixture).expect("a folder") {
            let file = file.expect("a file");
            fs::copy(file.path(), folder.path().join(file.file_name())).expect("the fixture is copied");
        }
        let neutral = Model::open(folder.path()).expect("a model");
        fs::write(folder.path().join("generation_config.json"), config.to_string()).expect("it is written");
        let model = Model::open(folder.path()).expect("a model");
        for temperature in [None, Some(0.7)] {
            let [server, command_line] = of_server_and_command_line(&model, temperature);
            assert_eq!(server, command_line);
            assert_ne!(
                server,
                of_server_and_command_line(&neutral, temperature)[0],
                "the file has no effect"
            );
        }
    }
}
