//! `/v1/completions`.

use super::{Finish, Usage, generation_request};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, sync::Arc};

generation_request! {
    /// A text to continue.
    struct CompletionRequest {
        /// One or several prompts, as texts or as tokens.
        pub(crate) prompt: Prompts,
        /// The most tokens of an answer; 16 if not given. llama.cpp's `n_predict` is the same.
        #[serde(default, alias = "n_predict")]
        pub(crate) max_tokens: Option<usize>,
        /// The number of most likely tokens to report at each position, at most 20; no tokens are reported if not given.
        #[serde(default)]
        pub(crate) logprobs: Option<usize>,
        /// Whether the answer starts with the prompt; not together with `logprobs`.
        #[serde(default)]
        pub(crate) echo: Option<bool>,
        /// Whether to report the ids of an answer's tokens, the only output of a model without a tokenizer.
        #[serde(default)]
        pub(crate) return_token_ids: Option<bool>,
    }
}

/// One or several prompts.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "must be a text, a list of texts, a list of tokens, or a list of lists of tokens"
)]
pub(crate) enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    ManyTokens(Vec<Vec<u32>>),
}

/// An answer, or a piece of one.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Completion {
    pub(crate) id: String,
    /// `text_completion`.
    pub(crate) object: &'static str,
    /// In seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
    /// The choices of the first prompt, then those of the second, and so on. A piece has one choice, the event with the usage none.
    pub(crate) choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
    /// Equal for answers of servers of equal version and configuration.
    pub(crate) system_fingerprint: Arc<str>,
}

impl CompletionRequest {
    /// The given fields that have no effect.
    pub(crate) fn without_effect(&self) -> Vec<&'static str> {
        self.common_without_effect()
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct CompletionChoice {
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    /// The token ids, if they were asked for, without the end token, but with the tokens of a stop text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
    pub(crate) finish_reason: Option<Finish>,
}

/// The probabilities of the tokens of a text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct CompletionLogprobs {
    pub(crate) tokens: Vec<String>,
    /// The natural logarithms of their probabilities.
    pub(crate) token_logprobs: Vec<f32>,
    /// The most likely tokens at each position.
    pub(crate) top_logprobs: Vec<BTreeMap<String, f32>>,
    /// The place in the answer where each token starts, in characters.
    pub(crate) text_offset: Vec<usize>,
}
