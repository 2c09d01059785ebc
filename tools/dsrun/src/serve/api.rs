//! The types of the API. Fields that OpenAI has have OpenAI's names and meanings; further fields are those of vLLM.
//!
//! Requests refuse unknown fields: a field has its effect or is answered with an error, and is never ignored.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod embeddings;
pub(crate) mod models;
pub(crate) mod tokens;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One or several texts.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "must be a text or a list of texts")]
pub(crate) enum Texts {
    One(String),
    Many(Vec<String>),
}

impl Texts {
    pub(crate) fn as_slice(&self) -> &[String] {
        match self {
            Self::One(text) => std::slice::from_ref(text),
            Self::Many(texts) => texts,
        }
    }
}

/// Options of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    /// Whether the last event has the usage.
    #[serde(default)]
    pub(crate) include_usage: Option<bool>,
}

/// The tokens that a request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    /// Tokens of all choices, end tokens included.
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
}

impl Usage {
    pub(crate) fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}

/// The reason why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Finish {
    /// The model ended its answer, or a stop string was generated.
    Stop,
    /// The limit on tokens or the end of the context was reached.
    Length,
    /// The model called tools.
    ToolCalls,
}

/// The format of the answer.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ResponseFormat {
    /// Plain text.
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON that follows a schema.
    JsonSchema {
        /// The schema.
        json_schema: NamedSchema,
    },
    /// Text that follows a grammar or a regular expression.
    Grammar {
        /// The language of the definition.
        syntax: Syntax,
        /// The grammar or regular expression that the whole answer has to match.
        definition: String,
    },
}

/// A JSON schema.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamedSchema {
    /// The name of the schema.
    pub(crate) name: String,
    /// The purpose of the schema. The model does not see it.
    #[serde(default)]
    pub(crate) description: Option<String>,
    /// The schema; any JSON if not given.
    #[serde(default)]
    pub(crate) schema: Option<serde_json::Value>,
    /// Accepted for compatibility: answers always follow the schema.
    #[serde(default)]
    pub(crate) strict: Option<bool>,
}

/// The language of a grammar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Syntax {
    /// Lark, in the dialect of llguidance.
    Lark,
    /// A regular expression.
    Regex,
}

/// A token and its probability.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct TokenLogprob {
    /// Its text; the replacement character stands for a part of a character.
    pub(crate) token: String,
    /// The natural logarithm of its probability, after penalties and before temperature and filters.
    pub(crate) logprob: f32,
    /// Its bytes.
    pub(crate) bytes: Vec<u8>,
}

/// The fields that both kinds of completion have, apart from the prompt.
#[derive(Clone, Debug)]
pub(crate) struct Generation {
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) n: usize,
    pub(crate) stop: Vec<String>,
    pub(crate) seed: Option<i64>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<i64>,
    pub(crate) min_p: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) logit_bias: BTreeMap<String, f32>,
    pub(crate) ignore_eos: bool,
    pub(crate) min_tokens: usize,
    pub(crate) priority: i32,
    pub(crate) response_format: Option<ResponseFormat>,
}

/// Declares a request with the fields that both kinds of completion have.
macro_rules! generation_request {
    ($(#[$attribute:meta])* struct $name:ident { $($fields:tt)* }) => {
        $(#[$attribute])*
        #[derive(Clone, Debug, serde::Deserialize, schemars::JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct $name {
            $($fields)*
            /// The model, by the name that /v1/models lists.
            pub(crate) model: String,
            /// Whether the answer is streamed as server-sent events.
            #[serde(default)]
            pub(crate) stream: Option<bool>,
            /// Options of the stream; only with `stream`.
            #[serde(default)]
            pub(crate) stream_options: Option<super::StreamOptions>,
            /// The number of answers.
            #[serde(default)]
            pub(crate) n: Option<usize>,
            /// Texts that end an answer. They are not part of it.
            #[serde(default)]
            pub(crate) stop: Option<super::Texts>,
            /// The seed: equal seeds give equal answers, whatever else the server does. Random if not given.
            #[serde(default)]
            pub(crate) seed: Option<i64>,
            /// Temperature: 0 takes the most likely token; 1 samples from the model's own distribution. The model's default if
            /// not given, else 1.
            #[serde(default)]
            pub(crate) temperature: Option<f32>,
            /// Keep the most likely tokens until their probabilities sum to this.
            #[serde(default)]
            pub(crate) top_p: Option<f32>,
            /// Keep this many of the most likely tokens; 0 and -1 keep all.
            #[serde(default)]
            pub(crate) top_k: Option<i64>,
            /// Keep tokens at least this likely, relative to the most likely one.
            #[serde(default)]
            pub(crate) min_p: Option<f32>,
            /// Subtracted once from the logits of generated tokens.
            #[serde(default)]
            pub(crate) presence_penalty: Option<f32>,
            /// Subtracted from the logits of tokens for every time they were generated.
            #[serde(default)]
            pub(crate) frequency_penalty: Option<f32>,
            /// Divides the logits of tokens that occur in the prompt or the answer.
            #[serde(default)]
            pub(crate) repetition_penalty: Option<f32>,
            /// Added to the logits of tokens, by token id, from -100 to 100.
            #[serde(default)]
            pub(crate) logit_bias: Option<std::collections::BTreeMap<String, f32>>,
            /// Whether answers continue past the model's end tokens.
            #[serde(default)]
            pub(crate) ignore_eos: Option<bool>,
            /// The fewest tokens before an end token is chosen.
            #[serde(default)]
            pub(crate) min_tokens: Option<usize>,
            /// Requests of higher priority run before those of lower priority.
            #[serde(default)]
            pub(crate) priority: Option<i32>,
            /// The format of the answer.
            #[serde(default)]
            pub(crate) response_format: Option<super::ResponseFormat>,
            /// The user. It has no effect.
            #[serde(default)]
            #[expect(dead_code, reason = "clients send it, and it has no effect")]
            pub(crate) user: Option<String>,
        }

        impl $name {
            /// The fields that both kinds of completion have.
            pub(crate) fn generation(&self) -> super::Generation {
                let options = self.stream_options.unwrap_or_default();
                super::Generation {
                    stream: self.stream.unwrap_or(false),
                    include_usage: options.include_usage.unwrap_or(false),
                    n: self.n.unwrap_or(1),
                    stop: self.stop.as_ref().map_or_else(Vec::new, |stop| stop.as_slice().to_vec()),
                    seed: self.seed,
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    repetition_penalty: self.repetition_penalty,
                    logit_bias: self.logit_bias.clone().unwrap_or_default(),
                    ignore_eos: self.ignore_eos.unwrap_or(false),
                    min_tokens: self.min_tokens.unwrap_or(0),
                    priority: self.priority.unwrap_or(0),
                    response_format: self.response_format.clone(),
                }
            }
        }
    };
}
use generation_request;
