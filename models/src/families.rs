//! The model families: one file each, with configuration fields, defaults, tensor names and layer.
//!
//! To add a family, write its file and add it to the list [`FAMILIES`]. A file defines one [`Architecture`] per `model_type`:
//! functions that read the configuration, the tensor names that differ from the usual ones, and a function that builds the
//! layer with the methods of [`Builder`](crate::layers::Builder). `llama.rs` is the plainest file to start from.

mod albert;
mod architecture;
mod bert;
mod cohere;
mod deepseek;
mod deepseek_gguf;
mod distilbert;
mod exaone4;
mod gemma;
mod gemma2;
mod glm;
mod glm4;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod granite_moe;
mod llama;
mod llama4;
mod minimax_m2;
mod ministral;
mod mixtral;
mod modernbert;
mod olmo;
mod olmoe;
mod opt;
mod phi;
mod phi2;
mod phimoe;
mod qwen;
mod qwen_moe;
mod relatives;
mod roberta;
mod smollm3;
mod stablelm;
mod starcoder2;

use crate::{
    config::{
        ConfigError, DecoderConfig, Result,
        fields::Fields,
        gguf::{Keys, whole_key},
        hugging_face,
    },
    declare::Declare,
    gguf::GgufFile,
    layers,
    step::ProgramOptions,
};
use architecture::Architecture;
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
    mixtral::ARCHITECTURES,
    qwen_moe::ARCHITECTURES,
    olmoe::ARCHITECTURES,
    minimax_m2::ARCHITECTURES,
    gpt_oss::ARCHITECTURES,
    granite_moe::ARCHITECTURES,
    glm::ARCHITECTURES,
    deepseek::ARCHITECTURES,
    phimoe::ARCHITECTURES,
    llama4::ARCHITECTURES,
    ministral::ARCHITECTURES,
    gemma2::ARCHITECTURES,
    granite::ARCHITECTURES,
    glm4::ARCHITECTURES,
    starcoder2::ARCHITECTURES,
    phi2::ARCHITECTURES,
    cohere::ARCHITECTURES,
    gpt_neox::ARCHITECTURES,
    exaone4::ARCHITECTURES,
    stablelm::ARCHITECTURES,
    relatives::ARCHITECTURES,
    bert::ARCHITECTURES,
    roberta::ARCHITECTURES,
    distilbert::ARCHITECTURES,
    albert::ARCHITECTURES,
    modernbert::ARCHITECTURES,
];

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
