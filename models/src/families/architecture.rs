//! The description of an architecture, which the file of its family gives.

use crate::{
    config::{DecoderConfig, Result, fields::Fields, gguf::Keys},
    layers::Blocks,
    tensor_names::Names,
};
use serde_json::{Map, Value};

/// An architecture holds everything that is specific to the models of one `model_type`.
#[derive(Debug)]
pub(crate) struct Architecture {
    /// The value of `model_type` in `config.json`.
    pub(crate) name: &'static str,
    /// The reader of `config.json`.
    pub(super) config: fn(&Fields<'_>) -> Result<DecoderConfig>,
    /// Fields of `config.json` that do not change the result in this architecture.
    pub(super) harmless: &'static [&'static str],
    /// The tensor names in safetensors files.
    pub(crate) tensors: Names,
    /// The embedding and the layer.
    pub(super) blocks: Blocks,
    /// The form of the architecture in GGUF files, if llama.cpp supports it.
    pub(crate) gguf: Option<Gguf>,
    /// Whether `export` can write models: every tensor of a file must be exactly one part of the decoder.
    pub(crate) writable: bool,
}

/// The form of an architecture in GGUF files.
#[derive(Debug)]
pub(crate) struct Gguf {
    /// The value of `general.architecture` in the metadata.
    pub(super) name: &'static str,
    /// The reader of the metadata.
    pub(super) config: fn(&Keys<'_>) -> Result<DecoderConfig>,
    /// The tensor names.
    pub(crate) tensors: Names,
    /// How `export` writes `config.json` for such a file; `None` if its weights do not fit that form.
    pub(crate) export: Option<Export>,
}

/// The parts of a `config.json` written for a GGUF file that depend on the architecture.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Export {
    /// The class name in transformers.
    pub(crate) class: &'static str,
    /// Returns the fields that only some families have, or why they cannot express the configuration.
    pub(crate) fields: fn(&DecoderConfig) -> Result<Map<String, Value>, &'static str>,
}
