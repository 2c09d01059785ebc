//! Requests to the engine, and the tokens it returns.

use crate::{
    error::{ConstraintError, EngineError, Result},
    sampling::SamplingOptions,
};
use std::{
    fmt::Debug,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// A request to continue a prompt.
///
/// Several answers to one prompt are several requests with different seeds; they share the pages of the prompt.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The prompt's tokens; at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// The maximum number of tokens to generate; by default what fits into the context.
    pub max_tokens: Option<usize>,
    /// The minimum number of tokens to generate before a token that ends the answer is chosen, unless a constraint allows nothing
    /// else.
    pub min_tokens: usize,
    /// Tokens that end the answer, besides the model's own.
    pub stop_ids: Vec<u32>,
    /// Whether the model's own end tokens do not end the answer.
    pub ignore_end: bool,
    /// Values added to the logits of tokens; minus infinity forbids a token. Several answers to one prompt share them.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// How many of the most likely tokens to report with each token.
    pub top_log_probabilities: usize,
    /// Requests of higher priority run before, and pre-empt, those of lower priority.
    pub priority: i32,
    /// Requests share cached prefixes only with requests of the same salt, or of no salt. With a secret salt, other clients
    /// cannot find out by timing which prompts were sent.
    pub cache_salt: Option<String>,
    /// Restricts the tokens of the answer.
    pub constraint: Option<Box<dyn Constraint>>,
}

impl Request {
    /// The largest [`Self::top_log_probabilities`].
    pub const MAX_TOP: usize = 64;

    /// A request to continue a prompt greedily.
    pub fn new(prompt: impl Into<Vec<u32>>) -> Self {
        Self { prompt: prompt.into(), ..Self::default() }
    }
}

/// How the hidden states of a text are pooled into one vector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The mean over all tokens.
    #[default]
    Mean,
    /// The hidden state of the last token.
    Last,
    /// The hidden state of the first token.
    First,
    /// What the classification head of the model computes: a score for each label.
    Scores,
}

/// A request to embed a text, that is, to turn it into one vector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EmbeddingRequest {
    /// The text's tokens; at least one.
    pub tokens: Vec<u32>,
    /// How the hidden states are pooled.
    pub pooling: Pooling,
    /// Whether the vector keeps its length. Otherwise embeddings are scaled to length 1; scores are never scaled.
    pub keep_length: bool,
    /// The index of the first token of the second text of a pair, which gets its own token type; `None` for a single text.
    pub second: Option<usize>,
    /// Requests of higher priority run before, and pre-empt, those of lower priority.
    pub priority: i32,
}

/// Restricts an answer token by token: a grammar, a schema, a regular expression.
///
/// It runs between steps, beside those of other requests where the machine has several cores. A slow constraint delays every request.
pub trait Constraint: Send + Debug {
    /// Sets the bit of every token that may come next: bit `token % 32` of word `token / 32`. All bits are 0 initially. If the
    /// answer is complete, the model's end tokens may come next.
    ///
    /// # Errors
    /// Ends the request.
    fn allow(&mut self, tokens: &mut [u32]) -> Result<(), ConstraintError>;

    /// Advances by the sampled token, one of those allowed.
    ///
    /// # Errors
    /// Ends the request.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintError>;

    /// A copy that is independent of this constraint.
    fn clone_box(&self) -> Box<dyn Constraint>;
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Self {
        (**self).clone_box()
    }
}

/// Identifies a request. Ids are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// The source of request ids; clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestIds(Arc<AtomicU64>);

impl RequestIds {
    /// A new id.
    pub(crate) fn next(&self) -> RequestId {
        RequestId(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its answer, or a stop token or stop string was generated.
    Stop,
    /// The limit on tokens or the end of the context was reached.
    Length,
    /// The request was cancelled.
    Cancelled,
}

/// A token of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenEvent {
    /// The request.
    pub request: RequestId,
    /// The token.
    pub token: u32,
    /// The natural logarithm of the token's probability, after penalties and before temperature and filters.
    pub log_probability: f32,
    /// The most likely tokens at this position with the logarithms of their probabilities, the most likely first: as many as
    /// [`Request::top_log_probabilities`] asks for.
    pub top: Vec<(u32, f32)>,
    /// The reason why the request ended, set on its last token.
    pub finish: Option<FinishReason>,
    /// The number of prompt tokens that were found in the cache of prefixes.
    pub cached: usize,
}

/// The limits of an engine, which requests are checked against before they are queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// Tokens a request may have, prompt and answer together.
    pub context: usize,
    /// The number of tokens the model knows.
    pub vocabulary: usize,
    /// Token slots of a page of the KV cache.
    pub block_size: usize,
    /// Pages of the KV cache.
    pub pages: usize,
    /// Whether the model is an encoder, which embeds or classifies whole texts, and generates nothing.
    pub encoder: bool,
    /// The number of scores that the model's classification head gives a text; `None` if it has no such head.
    pub labels: Option<usize>,
}

impl RequestLimits {
    /// Checks a request.
    ///
    /// # Errors
    /// If the prompt is empty, has tokens the model does not have, or can never fit; if an option is out of range.
    pub fn check(&self, request: &Request) -> Result<()> {
        self.check_generates()?;
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
        for (token, bias) in request.logit_bias.iter() {
            self.check_token(*token)?;
            if bias.is_nan() || *bias == f32::INFINITY {
                return Err(EngineError::option("logit-bias", bias, "must be a number, or minus infinity"));
            }
        }
        self.check_pages(self.most_pages(request))
    }

    /// Checks that the model generates tokens.
    ///
    /// # Errors
    /// If it is an encoder.
    pub(crate) fn check_generates(&self) -> Result<()> {
        if !self.encoder {
            return Ok(());
        }
        Err(EngineError::Missing {
            what: "head that predicts tokens",
            hint: "it is an encoder, which embeds and scores texts and cannot generate",
        })
    }

    /// Checks an embedding request.
    ///
    /// # Errors
    /// If it has no tokens, has tokens that the model does not have, or can never fit; if it asks for scores, or has two parts, and
    /// the model does not support that.
    pub fn check_embedding(&self, request: &EmbeddingRequest) -> Result<()> {
        if request.pooling == Pooling::Scores && self.labels.is_none() {
            return Err(EngineError::Missing {
                what: "classification head",
                hint: "scores need a model for sequence classification, such as a cross-encoder",
            });
        }
        match request.second {
            Some(second) if second >= request.tokens.len() => {
                let rule = format!("must be one of the {} tokens", request.tokens.len());
                return Err(EngineError::option("second", second, rule));
            }
            Some(second) if !self.encoder => {
                return Err(EngineError::option(
                    "second",
                    second,
                    "must be absent: the model is not an encoder",
                ));
            }
            _ => {}
        }
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

    /// The maximum number of tokens a request may generate: one token can still be sampled after a full context.
    pub(crate) fn most_tokens(&self, request: &Request) -> usize {
        let room = self.context - request.prompt.len() + 1;
        request.max_tokens.unwrap_or(usize::MAX).min(room)
    }

    /// The maximum number of pages a request holds: the last generated token is never processed, so it needs no slot.
    pub(crate) fn most_pages(&self, request: &Request) -> usize {
        let prompt = request.prompt.len();
        (prompt + self.most_tokens(request) - 1).max(prompt).div_ceil(self.block_size)
    }
}
