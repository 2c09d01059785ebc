//! `/v1/embeddings`.

use super::completions::Prompts;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Texts to embed.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EmbeddingRequest {
    /// The model, by the name that /v1/models lists; there is only one.
    #[serde(default)]
    pub(crate) model: Option<String>,
    /// One or several texts, as texts or as tokens.
    pub(crate) input: Prompts,
    /// The encoding of embeddings; numbers if not given.
    #[serde(default)]
    pub(crate) encoding_format: Option<EncodingFormat>,
    /// The number of elements of vectors: that of the model, or for models that were trained for shorter vectors, fewer.
    #[serde(default)]
    pub(crate) dimensions: Option<usize>,
    /// How the hidden states of a text become one vector: as the model's files say if not given, and by their mean if they do not say.
    #[serde(default)]
    pub(crate) pooling: Option<Pooling>,
    /// Whether vectors are scaled to length 1: as the model's files say if not given, and true if they do not say.
    #[serde(default)]
    pub(crate) normalize: Option<bool>,
    /// Requests of higher priority run before those of lower priority. Above 0 only for API keys that may set it.
    #[serde(default)]
    pub(crate) priority: Option<i32>,
    /// The user. It has no effect.
    #[serde(default)]
    pub(crate) user: Option<serde_json::Value>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EncodingFormat {
    /// Numbers.
    #[default]
    Float,
    /// The base64 of 32-bit floats, little-endian.
    Base64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pooling {
    /// The mean over the text's tokens.
    Mean,
    /// The text's last token.
    Last,
    /// The text's first token, which encoders are trained to put the meaning of a text into.
    Cls,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct EmbeddingList {
    /// `list`.
    pub(crate) object: &'static str,
    pub(crate) model: String,
    pub(crate) data: Vec<Embedding>,
    pub(crate) usage: EmbeddingUsage,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Embedding {
    /// `embedding`.
    pub(crate) object: &'static str,
    /// The index of the text in the request.
    pub(crate) index: usize,
    /// The vector, of length 1 unless the model or the request says otherwise.
    pub(crate) embedding: Vector,
}

/// An encoded embedding.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub(crate) enum Vector {
    Numbers(Vec<f32>),
    Base64(String),
}

/// The tokens that a request used.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct EmbeddingUsage {
    pub(crate) prompt_tokens: usize,
    /// The same number.
    pub(crate) total_tokens: usize,
}
