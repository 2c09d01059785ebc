//! `/v1/completions`.

use super::{
    api::completions::{Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Prompts},
    app::{App, Loaded},
    body::read_json,
    error::ApiError,
    events,
    generation::{Answers, Job, MAX_TOP, Piece},
    grammar::Grammar,
    text::Token,
};
use axum::{
    Json,
    body::Body,
    extract::State,
    http::Request,
    response::{IntoResponse, Response},
};
use dsrun_models::tokenizer::EncodeOptions;
use std::sync::Arc;

/// The most tokens of an answer, where the request does not say. OpenAI's number.
const MAX_TOKENS: usize = 16;

pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let loaded = app.ready()?;
    let request: CompletionRequest = read_json(request, app.limits.body).await?;
    app.check_model(&request.model)?;
    let token_ids = request.return_token_ids.unwrap_or(false);
    let prepared = loaded.clone();
    let (job, echoes) = app.blocking(move || prepare(&request, &prepared)).await?;
    let stream = job.generation.stream.then_some(job.generation.include_usage);
    let completions = Completions {
        id: events::id("cmpl"),
        created: events::now(),
        model: app.name.clone(),
        logprobs: job.logprobs.is_some(),
        token_ids,
        choices: job.generation.n,
        echoes,
    };
    let answers = job.submit(&app, &loaded)?;
    match stream {
        Some(include_usage) => Ok(completions.stream(answers, include_usage)),
        None => completions.whole(answers).await,
    }
}

/// From a request to what is to be generated, and the text of each prompt if answers start with it.
fn prepare(request: &CompletionRequest, loaded: &Loaded) -> Result<(Job, Vec<String>), ApiError> {
    let generation = request.generation();
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
    let prompts = encode(&request.prompt, loaded, "prompt", true)?;
    // An empty list is a list of anything.
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
    let grammar = match &generation.response_format {
        Some(format) => Grammar::of(format, loaded)?,
        None => None,
    };
    let max_tokens = Some(request.max_tokens.unwrap_or(MAX_TOKENS));
    Ok((Job { prompts, generation, max_tokens, logprobs: request.logprobs, grammar }, echoes))
}

/// Prompts as tokens. `parse_special` reads control tokens in texts as such.
pub(crate) fn encode(
    prompts: &Prompts,
    loaded: &Loaded,
    field: &str,
    parse_special: bool,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let text = |text: &String| {
        let options = EncodeOptions { add_special: true, parse_special };
        loaded.tokenizer()?.encode(text, options).map_err(|error| ApiError::field(field, error.to_string()))
    };
    Ok(match prompts {
        Prompts::Text(prompt) => vec![text(prompt)?],
        Prompts::Texts(prompts) => prompts.iter().map(text).collect::<Result<_, _>>()?,
        Prompts::Tokens(prompt) => vec![prompt.clone()],
        Prompts::ManyTokens(prompts) => prompts.clone(),
    })
}

/// What all parts of a response need.
struct Completions {
    id: String,
    created: u64,
    model: String,
    logprobs: bool,
    token_ids: bool,
    /// Of each prompt.
    choices: usize,
    /// What answers start with.
    echoes: Vec<String>,
}

impl Completions {
    fn choice(&self, index: usize) -> CompletionChoice {
        let text = self.echoes.get(index / self.choices).cloned().unwrap_or_default();
        let logprobs = self.logprobs.then(CompletionLogprobs::default);
        let token_ids = self.token_ids.then(Vec::new);
        CompletionChoice { index, text, logprobs, token_ids, finish_reason: None }
    }

    fn completion(&self, choices: Vec<CompletionChoice>) -> Completion {
        Completion {
            id: self.id.clone(),
            object: "text_completion",
            created: self.created,
            model: self.model.clone(),
            choices,
            usage: None,
        }
    }

    /// The answers as a whole.
    async fn whole(self, mut answers: Answers) -> Result<Response, ApiError> {
        let mut choices = Vec::new();
        while let Some(piece) = answers.next().await {
            let piece = piece?;
            while choices.len() <= piece.index {
                choices.push(self.choice(choices.len()));
            }
            let choice = &mut choices[piece.index];
            choice.add(piece);
        }
        let usage = Some(answers.usage());
        Ok(Json(Completion { usage, ..self.completion(choices) }).into_response())
    }

    /// The answers piece by piece.
    fn stream(self, answers: Answers, include_usage: bool) -> Response {
        let mut begun: Vec<bool> = Vec::new();
        events::stream(answers, include_usage, move |news| {
            let piece = match news {
                events::News::Usage(usage) => {
                    return vec![Completion { usage: Some(usage), ..self.completion(Vec::new()) }];
                }
                events::News::Piece(piece) => piece,
            };
            let mut choice = self.choice(piece.index);
            begun.resize(begun.len().max(piece.index + 1), false);
            if std::mem::replace(&mut begun[piece.index], true) {
                choice.text.clear();
            }
            choice.add(piece);
            if choice.tells_nothing() { Vec::new() } else { vec![self.completion(vec![choice])] }
        })
    }
}

impl CompletionChoice {
    fn add(&mut self, piece: Piece) {
        self.text.push_str(&piece.text);
        if let Some(logprobs) = &mut self.logprobs {
            piece.tokens.into_iter().for_each(|token| logprobs.add(token));
        }
        if let Some(ids) = &mut self.token_ids {
            ids.extend(piece.id);
        }
        self.finish_reason = piece.finish;
    }

    fn tells_nothing(&self) -> bool {
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
