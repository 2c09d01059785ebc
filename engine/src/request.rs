//! What is asked of the engine, and what it gives back.

use crate::{
    error::{EngineError, Result},
    runner::pooler::EmbeddingRequest,
    sampling::SamplingOptions,
};
use std::{
    fmt::Debug,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// What is asked of the engine: a prompt and how to continue it.
///
/// Several answers to one prompt are several requests, with different seeds: they share the pages of the prompt.
#[derive(Debug, Default)]
pub struct Request {
    /// The prompt's tokens; at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// The most tokens to generate; what fits into the context if absent.
    pub max_tokens: Option<usize>,
    /// No token that ends the answer is chosen before so many tokens are generated, unless a constraint leaves nothing else.
    pub min_tokens: usize,
    /// Tokens that end the answer, besides the model's own.
    pub stop_ids: Vec<u32>,
    /// Whether the model's own end tokens do not end the answer.
    pub ignore_end: bool,
    /// What is added to the logits of tokens; minus infinity forbids one.
    pub logit_bias: Vec<(u32, f32)>,
    /// How many of the likeliest tokens to report beside each token.
    pub top_log_probabilities: usize,
    /// Requests of a higher priority run before, and in place of, those of a lower one.
    pub priority: i32,
    /// What the answer has to look like.
    pub constraint: Option<Box<dyn Constraint>>,
}

impl Request {
    /// The most of [`Self::top_log_probabilities`].
    pub const MAX_TOP: usize = 64;

    /// A prompt to be continued greedily.
    pub fn new(prompt: impl Into<Vec<u32>>) -> Self {
        Self { prompt: prompt.into(), ..Self::default() }
    }
}

/// Says token by token what may come next: a grammar, a schema, a regular expression.
///
/// Runs on the engine's thread, between steps: what takes long here holds up that request, and the others by as long.
pub trait Constraint: Send + Debug {
    /// Sets the bit of every token that may come next: bit `token % 32` of word `token / 32`. All bits come unset. Where the
    /// answer is complete, that is the model's end tokens.
    ///
    /// # Errors
    /// Ends the request.
    fn allow(&mut self, tokens: &mut [u32]) -> Result<(), ConstraintError>;

    /// Takes the token that was chosen. It is one that was allowed.
    ///
    /// # Errors
    /// Ends the request.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintError>;
}

/// Why a constraint could not go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the constraint on the answer failed: {0}")]
pub struct ConstraintError(
    /// What happened.
    pub String,
);

/// A request's number. Numbers are not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// Where numbers of requests come from; clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestIds(Arc<AtomicU64>);

impl RequestIds {
    pub(crate) fn next(&self) -> RequestId {
        RequestId(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its answer, or a stop token or stop string came.
    Stop,
    /// The limit on tokens, or the context, was reached.
    Length,
    /// It was cancelled.
    Cancelled,
}

/// A token of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenEvent {
    /// Whose it is.
    pub request: RequestId,
    /// The token.
    pub token: u32,
    /// The natural logarithm of its probability, after penalties and before temperature and filters.
    pub log_probability: f32,
    /// The likeliest tokens in its place with the logarithms of their probabilities, the likeliest first: as many as
    /// [`Request::top_log_probabilities`] asked for.
    pub top: Vec<(u32, f32)>,
    /// Set on a request's last token.
    pub finish: Option<FinishReason>,
}

/// What an engine can take. Requests are checked against it before they are queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// Tokens a request may have, prompt and answer together.
    pub context: usize,
    /// Tokens the model knows.
    pub vocabulary: usize,
    /// Slots of a page of the KV cache.
    pub block_size: usize,
    /// Pages of the KV cache.
    pub pages: usize,
}

impl RequestLimits {
    /// Checks a request.
    ///
    /// # Errors
    /// If the prompt is empty, has tokens the model does not have, or can never fit; if an option is out of range.
    pub fn check(&self, request: &Request) -> Result<()> {
        request.sampling.validate()?;
        self.check_prompt(&request.prompt)?;
        if request.max_tokens == Some(0) {
            return Err(EngineError::option("max-tokens", 0, "must be at least 1"));
        }
        if request.min_tokens > self.most_tokens(request) {
            let rule = format!("the answer has at most {} tokens", self.most_tokens(request));
            return Err(EngineError::option("min-tokens", request.min_tokens, rule));
        }
        if request.top_log_probabilities > Request::MAX_TOP {
            let rule = format!("must be at most {}", Request::MAX_TOP);
            return Err(EngineError::option("top-logprobs", request.top_log_probabilities, rule));
        }
        for (token, bias) in &request.logit_bias {
            self.check_token(*token)?;
            if bias.is_nan() || *bias == f32::INFINITY {
                return Err(EngineError::option("logit-bias", bias, "must be a number, or minus infinity"));
            }
        }
        self.check_pages(self.most_pages(request))
    }

    /// Checks a request for a vector.
    ///
    /// # Errors
    /// If it has no tokens, or some that the model does not have, or can never fit.
    pub fn check_embedding(&self, request: &EmbeddingRequest) -> Result<()> {
        self.check_prompt(&request.tokens)?;
        self.check_pages(request.tokens.len().div_ceil(self.block_size))
    }

    fn check_pages(&self, pages: usize) -> Result<()> {
        if pages > self.pages {
            let rule = format!("this request alone needs {} tokens of KV cache", pages * self.block_size);
            return Err(EngineError::option("kv-tokens", self.pages * self.block_size, rule));
        }
        Ok(())
    }

    pub(crate) fn check_prompt(&self, prompt: &[u32]) -> Result<()> {
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if prompt.len() > self.context {
            return Err(EngineError::PromptTooLong { tokens: prompt.len(), context: self.context });
        }
        prompt.iter().try_for_each(|token| self.check_token(*token))
    }

    fn check_token(&self, token: u32) -> Result<()> {
        if token as usize >= self.vocabulary {
            return Err(EngineError::NoSuchToken { token, vocabulary: self.vocabulary });
        }
        Ok(())
    }

    /// The most tokens a request may generate: the token after a full context can still be sampled.
    pub(crate) fn most_tokens(&self, request: &Request) -> usize {
        let room = self.context - request.prompt.len() + 1;
        request.max_tokens.unwrap_or(usize::MAX).min(room)
    }

    /// The pages a request holds at its longest: the last token generated is never fed back, so it needs no slot.
    pub(crate) fn most_pages(&self, request: &Request) -> usize {
        let prompt = request.prompt.len();
        (prompt + self.most_tokens(request) - 1).max(prompt).div_ceil(self.block_size)
    }
}
