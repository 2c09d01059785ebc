//! `/v1/models`.

use schemars::JsonSchema;
use serde::Serialize;

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ModelList {
    /// `list`.
    pub(crate) object: &'static str,
    pub(crate) data: Vec<ModelCard>,
}

/// A served model.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ModelCard {
    /// The name in requests.
    pub(crate) id: String,
    /// `model`.
    pub(crate) object: &'static str,
    /// The time of loading, in seconds since 1970.
    pub(crate) created: u64,
    pub(crate) owned_by: &'static str,
    /// The same name, as in vLLM: there are no adapters.
    pub(crate) root: String,
    /// Always `null`.
    pub(crate) parent: Option<String>,
    /// Tokens that a prompt and its answer may have together.
    pub(crate) max_model_len: usize,
}
