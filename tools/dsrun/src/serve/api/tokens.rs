//! `/tokenize` and `/detokenize`.

use super::chat::ChatMessage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A text or a conversation to turn into tokens.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TokenizeRequest {
    /// The model, by the name that /v1/models lists; there is only one.
    #[serde(default)]
    pub(crate) model: Option<String>,
    /// A text.
    #[serde(default)]
    pub(crate) prompt: Option<String>,
    /// A conversation, instead of a text.
    #[serde(default)]
    pub(crate) messages: Option<Vec<ChatMessage>>,
    /// Whether to add the special tokens that the model expects around a text; yes if not given.
    #[serde(default)]
    pub(crate) add_special_tokens: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct TokenizeResponse {
    pub(crate) tokens: Vec<u32>,
    pub(crate) count: usize,
    /// Tokens that a prompt and its answer may have together.
    pub(crate) max_model_len: usize,
}

/// Tokens to turn into text.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DetokenizeRequest {
    /// The model, by the name that /v1/models lists; there is only one.
    #[serde(default)]
    pub(crate) model: Option<String>,
    pub(crate) tokens: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct DetokenizeResponse {
    pub(crate) prompt: String,
}
