//! `/v1/rerank` and `/v1/score`, with the fields of Jina and of vLLM.

use super::{Texts, embeddings::EmbeddingUsage};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Documents to order by their relevance to a query.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RerankRequest {
    /// The model, by the name that /v1/models lists; there is only one.
    #[serde(default)]
    pub(crate) model: Option<String>,
    /// The query.
    pub(crate) query: String,
    /// The documents.
    pub(crate) documents: Vec<Document>,
    /// The number of documents to return, the most relevant first; all if not given.
    #[serde(default)]
    pub(crate) top_n: Option<usize>,
    /// Whether the answer has the texts of the documents; true if not given.
    #[serde(default)]
    pub(crate) return_documents: Option<bool>,
    /// Requests of higher priority run before those of lower priority. Above 0 only for API keys that may set it.
    #[serde(default)]
    pub(crate) priority: Option<i32>,
}

/// A document: a text, or an object with one.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "must be a text, or an object with a text")]
pub(crate) enum Document {
    Text(String),
    Object(DocumentText),
}

/// A document with its text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DocumentText {
    pub(crate) text: String,
}

impl Document {
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Text(text) | Self::Object(DocumentText { text }) => text,
        }
    }
}

/// Documents, the most relevant first.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Reranking {
    pub(crate) model: String,
    pub(crate) results: Vec<RankedDocument>,
    pub(crate) usage: EmbeddingUsage,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct RankedDocument {
    /// The index of the document in the request.
    pub(crate) index: usize,
    /// The document, if the request asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) document: Option<DocumentText>,
    /// The score: the higher, the more relevant.
    pub(crate) relevance_score: f64,
}

/// Pairs of texts to score.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ScoreRequest {
    /// The model, by the name that /v1/models lists; there is only one.
    #[serde(default)]
    pub(crate) model: Option<String>,
    /// The first text of each pair, or the one that all pairs share.
    pub(crate) text_1: Texts,
    /// The second text of each pair.
    pub(crate) text_2: Texts,
    /// Requests of higher priority run before those of lower priority. Above 0 only for API keys that may set it.
    #[serde(default)]
    pub(crate) priority: Option<i32>,
}

/// The scores of pairs, in the order of the request.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ScoreList {
    /// `list`.
    pub(crate) object: &'static str,
    pub(crate) model: String,
    pub(crate) data: Vec<Score>,
    pub(crate) usage: EmbeddingUsage,
}

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct Score {
    /// `score`.
    pub(crate) object: &'static str,
    /// The index of the pair.
    pub(crate) index: usize,
    pub(crate) score: f64,
}
