//! `/v1/completions`.

use super::{
    api::{
        Usage,
        completions::{
            Completion as CompletionBody, CompletionChoice, CompletionLogprobs, CompletionRequest,
        },
    },
    app::{App, Loaded},
    endpoint::{Completion, Header, complete},
    error::ApiError,
    generation::{Job, MAX_CHOICES, MAX_TOP, Piece},
    grammar::Grammar,
    intake::Work,
    prompts::encode,
    text::Token,
};
use axum::{body::Body, extract::State, http::Request, response::Response};
use std::sync::Arc;

/// The most tokens of an answer by default. OpenAI's number.
const MAX_TOKENS: usize = 16;

pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    complete::<TextCompletion>(app, request).await
}

/// The answers to one request.
struct TextCompletion {
    logprobs: bool,
    token_ids: bool,
    /// Choices of each prompt.
    choices_per_prompt: usize,
    /// The text of each prompt, if answers start with it.
    echoes: Vec<String>,
    /// Choices whose first event was sent.
    begun: Vec<bool>,
}

impl Completion for TextCompletion {
    type Request = CompletionRequest;
    type Choice = CompletionChoice;
    type Answer = CompletionBody;
    type Event = CompletionBody;

    const ID_PREFIX: &'static str = "cmpl";
    const OPERATION: &'static str = "text_completion";

    fn model(request: &CompletionRequest) -> Option<&str> {
        request.model.as_deref()
    }

    fn without_effect(request: &CompletionRequest, _: &Loaded) -> Vec<&'static str> {
        request.without_effect()
    }

    fn prepare(request: &CompletionRequest, loaded: &Loaded, work: &Work) -> Result<(Job, Self), ApiError> {
        let generation = request.generation()?;
        generation.check()?;
        let echo = request.echo.unwrap_or(false);
        if request.logprobs > Some(MAX_TOP) {
            return Err(ApiError::field("logprobs", format!("must be at most {MAX_TOP}")));
        }
        if echo && request.logprobs.is_some() {
            return Err(ApiError::field(
                "echo",
                "not together with logprobs: prompts have no probabilities here",
            ));
        }
        let prompts = encode(&request.prompt, loaded, "prompt", true, MAX_CHOICES, work)?;
        // An empty list has no prompts to check one by one.
        if prompts.iter().all(Vec::is_empty) {
            return Err(ApiError::field("prompt", "is empty: there is nothing to continue"));
        }
        let mut echoes = Vec::new();
        if echo {
            for prompt in &prompts {
                let text = loaded.tokenizer()?.decode(prompt, true);
                echoes.push(text.map_err(|error| ApiError::field("prompt", error.to_string()))?);
            }
        }
        let grammar = match &generation.form {
            Some(format) => Grammar::of(format, loaded)?,
            None => None,
        };
        let max_tokens = Some(request.max_tokens.unwrap_or(MAX_TOKENS));
        let completion = Self {
            logprobs: request.logprobs.is_some(),
            token_ids: request.return_token_ids.unwrap_or(false),
            choices_per_prompt: generation.n,
            echoes,
            begun: Vec::new(),
        };
        Ok((
            Job { prompts, generation, max_tokens, logprobs: request.logprobs, grammar, shown: [].into() },
            completion,
        ))
    }

    fn choice(&self, index: usize) -> CompletionChoice {
        let text = self.echoes.get(index / self.choices_per_prompt).cloned().unwrap_or_default();
        let logprobs = self.logprobs.then(CompletionLogprobs::default);
        let token_ids = self.token_ids.then(Vec::new);
        CompletionChoice { index, text, logprobs, token_ids, finish_reason: None }
    }

    fn add(&mut self, choice: &mut CompletionChoice, piece: Piece) {
        choice.text.push_str(&piece.text);
        if let Some(logprobs) = &mut choice.logprobs {
            piece.tokens.into_iter().for_each(|token| logprobs.add(token));
        }
        if let Some(ids) = &mut choice.token_ids {
            ids.extend(piece.id);
        }
        choice.finish_reason = piece.finish;
    }

    fn answer(self, header: Header, choices: Vec<CompletionChoice>, usage: Usage) -> CompletionBody {
        body(header, choices, Some(usage))
    }

    fn events(&mut self, header: &Header, piece: Piece) -> Vec<CompletionBody> {
        let mut choice = self.choice(piece.index);
        self.begun.resize(self.begun.len().max(piece.index + 1), false);
        // Only the first event of a choice has the prompt.
        if std::mem::replace(&mut self.begun[piece.index], true) {
            choice.text.clear();
        }
        self.add(&mut choice, piece);
        if choice.is_empty() { Vec::new() } else { vec![body(header.clone(), vec![choice], None)] }
    }

    fn closing(&mut self, header: &Header, usage: Usage, include_usage: bool) -> Vec<CompletionBody> {
        let event = include_usage.then(|| body(header.clone(), Vec::new(), Some(usage)));
        event.into_iter().collect()
    }
}

fn body(header: Header, choices: Vec<CompletionChoice>, usage: Option<Usage>) -> CompletionBody {
    let Header { id, created, model, fingerprint: system_fingerprint } = header;
    CompletionBody { id, object: "text_completion", created, model, choices, usage, system_fingerprint }
}

impl CompletionChoice {
    /// Whether there is nothing to send.
    fn is_empty(&self) -> bool {
        self.text.is_empty()
            && self.logprobs.as_ref().is_none_or(|logprobs| logprobs.tokens.is_empty())
            && self.token_ids.as_ref().is_none_or(Vec::is_empty)
            && self.finish_reason.is_none()
    }
}

impl CompletionLogprobs {
    fn add(&mut self, token: Token) {
        self.tokens.push(token.chosen.token);
        self.token_logprobs.push(token.chosen.logprob);
        self.top_logprobs.push(token.top.into_iter().map(|token| (token.token, token.logprob)).collect());
        self.text_offset.push(token.offset);
    }
}
