//! The model families: one file each, with configuration fields, defaults, tensor names and layer.
//!
//! To add a family, write its file and add it to the list [`FAMILIES`]. A file defines one [`Architecture`] per `model_type`:
//! functions that read the configuration, the tensor names that differ from the usual ones, and a function that builds the
//! layer with the methods of [`Builder`](crate::layers::Builder). `llama.rs` is the plainest file to start from.

mod gemma;
mod gpt2;
mod llama;
mod olmo;
mod opt;
mod phi;
mod qwen;
mod smollm3;

use crate::{
    config::{
        ConfigError, DecoderConfig, Result,
        fields::Fields,
        gguf::{Keys, whole_key},
        hugging_face,
    },
    declare::Declare,
    gguf::GgufFile,
    layers::{self, Blocks},
    step::ProgramOptions,
    tensor_names::Names,
};
use dsrun_core::{Error, program::Program};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// The architectures of every family; error messages list them in this order.
const FAMILIES: &[&[Architecture]] = &[
    llama::ARCHITECTURES,
    qwen::ARCHITECTURES,
    gemma::ARCHITECTURES,
    phi::ARCHITECTURES,
    olmo::ARCHITECTURES,
    smollm3::ARCHITECTURES,
    gpt2::ARCHITECTURES,
    opt::ARCHITECTURES,
];

/// An architecture holds everything that is specific to the models of one `model_type`.
#[derive(Debug)]
pub(crate) struct Architecture {
    /// The value of `model_type` in `config.json`.
    pub(crate) name: &'static str,
    /// The reader of `config.json`.
    config: fn(&Fields<'_>) -> Result<DecoderConfig>,
    /// Fields of `config.json` that do not change the result in this architecture.
    harmless: &'static [&'static str],
    /// The tensor names in safetensors files.
    pub(crate) tensors: Names,
    /// The embedding and the layer.
    blocks: Blocks,
    /// The form of the architecture in GGUF files, if llama.cpp supports it.
    pub(crate) gguf: Option<Gguf>,
    /// Whether `export` can write models: every tensor of a file must be exactly one part of the decoder.
    pub(crate) writable: bool,
}

/// The form of an architecture in GGUF files.
#[derive(Debug)]
pub(crate) struct Gguf {
    /// The value of `general.architecture` in the metadata.
    name: &'static str,
    /// The reader of the metadata.
    config: fn(&Keys<'_>) -> Result<DecoderConfig>,
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

/// Iterates over every architecture.
fn all() -> impl Iterator<Item = &'static Architecture> {
    FAMILIES.iter().copied().flatten()
}

/// Iterates over the names of the architectures that `export` can write.
pub(crate) fn writable() -> impl Iterator<Item = &'static str> {
    all().filter(|architecture| architecture.writable).map(|architecture| architecture.name)
}

/// Returns the architecture of a configuration.
pub(crate) fn of(config: &DecoderConfig) -> dsrun_core::Result<&'static Architecture> {
    let found = all().find(|architecture| architecture.name == config.architecture);
    found.ok_or_else(|| Error::invalid(format!("architecture {:?} is not supported", config.architecture)))
}

/// Builds the program of a model from the tensors that `weights` declares.
pub(crate) fn program(options: ProgramOptions, weights: Declare<'_>) -> dsrun_core::Result<Program> {
    layers::program(of(weights.config)?.blocks, options, weights)
}

impl DecoderConfig {
    /// Reads the content of a `config.json` file.
    ///
    /// # Errors
    /// Names the field that is missing, out of range, contradicts another, or is not understood.
    pub fn from_json_bytes(bytes: &[u8]) -> Result<Self> {
        let object: Map<String, Value> = serde_json::from_slice(bytes)
            .map_err(|error| ConfigError::Json { message: error.to_string() })?;
        let fields = Fields::new(&object);
        let name = fields.text("model_type")?;
        let name = name.ok_or_else(|| ConfigError::Missing { field: "model_type".into() })?;
        let architecture = all().find(|architecture| architecture.name == name).ok_or_else(|| {
            ConfigError::architecture("model_type", name, all().map(|architecture| architecture.name))
        })?;
        let config = (architecture.config)(&fields)?;
        hugging_face::refuse_unread(&fields, architecture.name, architecture.harmless)?;
        Ok(config)
    }

    /// Reads the metadata of a GGUF file and looks at the names of its tensors.
    ///
    /// # Errors
    /// As [`Self::from_json_bytes`].
    pub fn from_gguf(file: &GgufFile) -> Result<Self> {
        const FIELD: &str = "general.architecture";
        let name: &str =
            whole_key(file, FIELD)?.ok_or_else(|| ConfigError::Missing { field: FIELD.into() })?;
        let supported = || all().filter_map(|architecture| architecture.gguf.as_ref());
        let gguf = supported().find(|gguf| gguf.name == name).ok_or_else(|| {
            // Two architectures may share a name.
            let names: BTreeSet<_> = supported().map(|gguf| gguf.name).collect();
            ConfigError::architecture(FIELD, name, names.into_iter())
        })?;
        let keys = Keys::new(file, gguf.name);
        let config = (gguf.config)(&keys)?;
        keys.refuse_unread()?;
        Ok(config)
    }
}
