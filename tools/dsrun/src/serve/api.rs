//! The types of the API. Fields that OpenAI has have OpenAI's names and meanings; further fields are those of vLLM. `/v1/messages` is
//! that of Anthropic.
//!
//! Requests refuse unknown fields: a field has its effect or is answered with an error, and is never ignored.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod embeddings;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod rerank;
pub(crate) mod responses;
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
    /// It has no effect: every event is sent as it is.
    #[serde(default)]
    pub(crate) include_obfuscation: Option<bool>,
    /// It has no effect: only the last event has the usage.
    #[serde(default)]
    pub(crate) continuous_usage_stats: Option<bool>,
}

/// The tokens that a request used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    /// Tokens of all choices, end tokens included.
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
    pub(crate) prompt_tokens_details: PromptTokensDetails,
}

/// More about the tokens of prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct PromptTokensDetails {
    /// Tokens that were found in the cache, since an earlier prompt started with them.
    pub(crate) cached_tokens: usize,
}

impl Usage {
    pub(crate) fn new(prompt_tokens: usize, cached_tokens: usize, completion_tokens: usize) -> Self {
        let prompt_tokens_details = PromptTokensDetails { cached_tokens };
        let total_tokens = prompt_tokens + completion_tokens;
        Self { prompt_tokens, completion_tokens, total_tokens, prompt_tokens_details }
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

impl Finish {
    /// Its name in answers.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
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

/// The form of an answer, and the field that asks for it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Form {
    pub(crate) field: String,
    pub(crate) format: ResponseFormat,
}

impl From<ResponseFormat> for Form {
    fn from(format: ResponseFormat) -> Self {
        Self { field: "response_format".to_owned(), format }
    }
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

/// What an answer has to follow, in the form of vLLM: one of these fields.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct StructuredOutputs {
    /// A JSON schema, as an object or as a text.
    #[serde(default)]
    pub(crate) json: Option<serde_json::Value>,
    /// A regular expression.
    #[serde(default)]
    pub(crate) regex: Option<String>,
    /// Texts, one of which is the answer.
    #[serde(default)]
    pub(crate) choice: Option<Vec<String>>,
    /// A grammar in Lark, in the dialect of llguidance.
    #[serde(default)]
    pub(crate) grammar: Option<String>,
    /// Whether the answer is a JSON object.
    #[serde(default)]
    pub(crate) json_object: Option<bool>,
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
    pub(crate) cache_salt: Option<String>,
    pub(crate) form: Option<Form>,
    pub(crate) stop_token_ids: Vec<u32>,
}

/// Declares a request with the fields that both kinds of completion have.
macro_rules! generation_request {
    ($(#[$attribute:meta])* struct $name:ident { $($fields:tt)* }) => {
        $(#[$attribute])*
        #[derive(Clone, Debug, serde::Deserialize, schemars::JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct $name {
            $($fields)*
            /// The model, by the name that /v1/models lists; there is only one.
            #[serde(default)]
            pub(crate) model: Option<String>,
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
            /// not given; if it has none, 1 where another of these options is given, else what suits the size of the model.
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
            /// Divides the logits of tokens that occur in the prompt or the answer. llama.cpp's `repeat_penalty` is the same.
            #[serde(default, alias = "repeat_penalty")]
            pub(crate) repetition_penalty: Option<f32>,
            /// Added to the logits of tokens, by token id, from -100 to 100.
            #[serde(default)]
            pub(crate) logit_bias: Option<std::collections::BTreeMap<String, f32>>,
            /// Whether answers continue past the model's end tokens.
            #[serde(default)]
            pub(crate) ignore_eos: Option<bool>,
            /// The fewest tokens before an end token is chosen, or a stop string ends the answer.
            #[serde(default)]
            pub(crate) min_tokens: Option<usize>,
            /// Requests of higher priority run before those of lower priority. Above 0 only for API keys that may set it.
            #[serde(default)]
            pub(crate) priority: Option<i32>,
            /// A text, secret for best effect: cached prompts are shared only with requests of the same salt.
            #[serde(default)]
            pub(crate) cache_salt: Option<String>,
            /// The format of the answer.
            #[serde(default)]
            pub(crate) response_format: Option<super::ResponseFormat>,
            /// Tokens that end an answer, besides the model's own. They are not part of it.
            #[serde(default)]
            pub(crate) stop_token_ids: Option<Vec<u32>>,
            /// What an answer has to follow, instead of `response_format`.
            #[serde(default)]
            pub(crate) structured_outputs: Option<super::StructuredOutputs>,
            /// The same as `structured_outputs.json`.
            #[serde(default)]
            pub(crate) guided_json: Option<serde_json::Value>,
            /// The same as `structured_outputs.regex`.
            #[serde(default)]
            pub(crate) guided_regex: Option<String>,
            /// The same as `structured_outputs.choice`.
            #[serde(default)]
            pub(crate) guided_choice: Option<Vec<String>>,
            /// The same as `structured_outputs.grammar`.
            #[serde(default)]
            pub(crate) guided_grammar: Option<String>,
            /// The number of answers of which the best is returned: 1.
            #[serde(default)]
            pub(crate) best_of: Option<usize>,
            /// Whether control tokens are left out of answers: true.
            #[serde(default)]
            pub(crate) skip_special_tokens: Option<bool>,
            /// It has no effect: control tokens are not part of answers.
            #[serde(default)]
            pub(crate) spaces_between_special_tokens: Option<bool>,
            /// It has no effect: prompts are cached always.
            #[serde(default)]
            pub(crate) cache_prompt: Option<serde_json::Value>,
            /// It has no effect.
            #[serde(default)]
            pub(crate) guided_decoding_backend: Option<serde_json::Value>,
            /// It has no effect.
            #[serde(default)]
            pub(crate) metadata: Option<serde_json::Value>,
            /// It has no effect.
            #[serde(default)]
            pub(crate) prompt_cache_key: Option<serde_json::Value>,
            /// It has no effect.
            #[serde(default)]
            pub(crate) prompt_cache_retention: Option<serde_json::Value>,
            /// It has no effect.
            #[serde(default)]
            pub(crate) safety_identifier: Option<serde_json::Value>,
            /// It has no effect.
            #[serde(default)]
            pub(crate) service_tier: Option<serde_json::Value>,
            /// It has no effect: nothing is stored.
            #[serde(default)]
            pub(crate) store: Option<serde_json::Value>,
            /// The user. It has no effect.
            #[serde(default)]
            pub(crate) user: Option<serde_json::Value>,
        }

        impl $name {
            /// The given fields, of those that both kinds of completion have, that have no effect.
            fn common_without_effect(&self) -> Vec<&'static str> {
                let options = self.stream_options.unwrap_or_default();
                let given = [
                    ("best_of", self.best_of.is_some()),
                    ("cache_prompt", self.cache_prompt.is_some()),
                    ("guided_decoding_backend", self.guided_decoding_backend.is_some()),
                    ("metadata", self.metadata.is_some()),
                    ("prompt_cache_key", self.prompt_cache_key.is_some()),
                    ("prompt_cache_retention", self.prompt_cache_retention.is_some()),
                    ("safety_identifier", self.safety_identifier.is_some()),
                    ("service_tier", self.service_tier.is_some()),
                    ("skip_special_tokens", self.skip_special_tokens.is_some()),
                    ("spaces_between_special_tokens", self.spaces_between_special_tokens.is_some()),
                    ("store", self.store.is_some()),
                    ("stream_options.continuous_usage_stats", options.continuous_usage_stats.is_some()),
                    ("stream_options.include_obfuscation", options.include_obfuscation.is_some()),
                    ("user", self.user.is_some()),
                ];
                given.into_iter().filter(|(_, given)| *given).map(|(name, _)| name).collect()
            }

            /// The fields that both kinds of completion have.
            ///
            /// # Errors
            /// If the form of the answer is given in several ways.
            pub(crate) fn generation(&self) -> Result<super::Generation, crate::serve::error::ApiError> {
                let options = self.stream_options.unwrap_or_default();
                if self.best_of.is_some_and(|best_of| best_of != 1) {
                    return Err(crate::serve::error::ApiError::field("best_of", "must be 1: every answer is returned"));
                }
                if self.skip_special_tokens == Some(false) {
                    let message = "must be true: control tokens are not part of answers";
                    return Err(crate::serve::error::ApiError::field("skip_special_tokens", message));
                }
                let form = crate::serve::forms::form(
                    self.response_format.as_ref(),
                    self.structured_outputs.as_ref(),
                    &super::StructuredOutputs {
                        json: self.guided_json.clone(),
                        regex: self.guided_regex.clone(),
                        choice: self.guided_choice.clone(),
                        grammar: self.guided_grammar.clone(),
                        json_object: None,
                    },
                )?;
                Ok(super::Generation {
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
                    cache_salt: self.cache_salt.clone(),
                    form,
                    stop_token_ids: self.stop_token_ids.clone().unwrap_or_default(),
                })
            }
        }
    };
}
use generation_request;
