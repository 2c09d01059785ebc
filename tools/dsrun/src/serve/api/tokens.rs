//! `/tokenize` and `/detokenize`.

use super::chat::ChatMessage;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

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
    /// Whether a conversation ends with the start of an answer; yes if not given. Only with `messages`.
    #[serde(default)]
    pub(crate) add_generation_prompt: Option<bool>,
    /// Whether the last message goes on, which is an assistant's. Only with `messages`.
    #[serde(default)]
    pub(crate) continue_final_message: Option<bool>,
    /// Further variables of the chat template. Only with `messages`.
    #[serde(default)]
    pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
    /// Whether to return the tokens as they stand in the vocabulary, too.
    #[serde(default)]
    pub(crate) return_token_strs: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct TokenizeResponse {
    pub(crate) tokens: Vec<u32>,
    pub(crate) count: usize,
    /// Tokens that a prompt and its answer may have together.
    pub(crate) max_model_len: usize,
    /// The tokens as they stand in the vocabulary, if they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_strs: Option<Vec<String>>,
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
