//! The API's types. Where OpenAI has a field, it has OpenAI's name and meaning; further fields are those of vLLM.
//!
//! Requests refuse fields they do not know: what is asked for is done, or answered with an error, never dropped.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod embeddings;
pub(crate) mod models;
pub(crate) mod tokens;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A text, or several.
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

/// How a stream is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    /// Whether a last event tells how many tokens were used.
    #[serde(default)]
    pub(crate) include_usage: Option<bool>,
}

/// How many tokens a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    /// Of all choices, end tokens included.
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
}

impl Usage {
    pub(crate) fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Finish {
    /// The model ended its answer, or a stop string came.
    Stop,
    /// The limit on tokens, or the context, was reached.
    Length,
    /// The model calls tools.
    ToolCalls,
}

/// What the answer has to look like.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ResponseFormat {
    /// Anything.
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON that a schema describes.
    JsonSchema {
        /// The schema.
        json_schema: NamedSchema,
    },
    /// What a grammar or a regular expression describes.
    Grammar {
        /// The language of the definition.
        syntax: Syntax,
        /// The grammar, or the regular expression, which the whole answer has to match.
        definition: String,
    },
}

/// A JSON schema.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamedSchema {
    /// What it is called.
    pub(crate) name: String,
    /// What it is for. The model does not see this.
    #[serde(default)]
    pub(crate) description: Option<String>,
    /// The schema; anything if not given.
    #[serde(default)]
    pub(crate) schema: Option<serde_json::Value>,
    /// Answers always keep to the schema.
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

/// A token and how likely it was.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct TokenLogprob {
    /// Its text; the replacement character stands for part of a character.
    pub(crate) token: String,
    /// The natural logarithm of its probability, after penalties and before temperature and filters.
    pub(crate) logprob: f32,
    /// Its bytes.
    pub(crate) bytes: Vec<u8>,
}

/// What both kinds of completion take, apart from the prompt.
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
            /// Whether the answer comes in pieces, as server-sent events.
            #[serde(default)]
            pub(crate) stream: Option<bool>,
            /// How the stream is sent; only with `stream`.
            #[serde(default)]
            pub(crate) stream_options: Option<super::StreamOptions>,
            /// How many answers to give.
            #[serde(default)]
            pub(crate) n: Option<usize>,
            /// Texts that end an answer. They are not part of it.
            #[serde(default)]
            pub(crate) stop: Option<super::Texts>,
            /// Equal seeds give equal answers, whatever else the server does. Random if not given.
            #[serde(default)]
            pub(crate) seed: Option<i64>,
            /// 0 takes the likeliest token; 1 samples from the model's own distribution. As the model suggests if not given,
            /// else 1.
            #[serde(default)]
            pub(crate) temperature: Option<f32>,
            /// Keep the likeliest tokens until their probabilities reach this.
            #[serde(default)]
            pub(crate) top_p: Option<f32>,
            /// Keep this many of the likeliest tokens; 0 and -1 keep all.
            #[serde(default)]
            pub(crate) top_k: Option<i64>,
            /// Keep tokens at least this likely, relative to the likeliest.
            #[serde(default)]
            pub(crate) min_p: Option<f32>,
            /// Subtracted once from the logits of tokens generated before.
            #[serde(default)]
            pub(crate) presence_penalty: Option<f32>,
            /// Subtracted from the logits of tokens for every time they were generated.
            #[serde(default)]
            pub(crate) frequency_penalty: Option<f32>,
            /// Divides the logits of tokens seen before, in the prompt or generated.
            #[serde(default)]
            pub(crate) repetition_penalty: Option<f32>,
            /// Added to the logits of tokens, by token id, from -100 to 100.
            #[serde(default)]
            pub(crate) logit_bias: Option<std::collections::BTreeMap<String, f32>>,
            /// Whether answers go on past the model's end tokens.
            #[serde(default)]
            pub(crate) ignore_eos: Option<bool>,
            /// No end token is chosen before so many tokens.
            #[serde(default)]
            pub(crate) min_tokens: Option<usize>,
            /// Requests of a higher priority run before those of a lower one.
            #[serde(default)]
            pub(crate) priority: Option<i32>,
            /// What the answer has to look like.
            #[serde(default)]
            pub(crate) response_format: Option<super::ResponseFormat>,
            /// Who asks. Nothing depends on it.
            #[serde(default)]
            #[expect(dead_code, reason = "clients send it, and nothing depends on it")]
            pub(crate) user: Option<String>,
        }

        impl $name {
            /// What both kinds of completion take.
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
