//! Granite: Llama's layer with factors on embeddings, attention scores, residual branches and logits.
//!
//! Defaults: `num_key_value_heads` the number of query heads, `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and
//! `logits_scaling` 1, no biases. Logits are divided by `logits_scaling`.

use super::{
    architecture::{Architecture, Gguf},
    llama::{self, LLAMA},
};
use crate::{
    config::{
        ConfigError, DecoderConfig, FieldNames, Result,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults},
        rope::json::{self as rope, RopeDefaults},
    },
    layers::Blocks,
    tensor_names::Names,
};
use dsrun_core::op::{Nonlinearity, RopePairing};

const NAMES: FieldNames = FieldNames::HUGGING_FACE;

/// Granite without experts.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "granite",
    config,
    harmless: &[],
    blocks: BLOCKS,
    gguf: Some(Gguf {
        name: "granite",
        config: |keys| decoder_from_gguf(keys, "granite")?.checked(&FieldNames::GGUF),
        tensors: Names::GGUF,
        export: None,
    }),
    writable: false,
    ..LLAMA
}];

/// Llama's layer behind an embedding with a factor.
pub(super) const BLOCKS: Blocks =
    Blocks { embed: |build, table| build.embed_scaled(table), layer: llama::layer };

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let mut config = hugging_face::decoder(fields, "granite", &NAMES, &Defaults::LLAMA)?;
    config.biases = llama::biases(fields)?;
    config.rotate_all(rope::read(fields, RopeDefaults::of(&config))?);
    read_factors(fields, &mut config)?;
    config.checked(&NAMES)
}

/// Reads the four factors.
pub(super) fn read_factors(fields: &Fields<'_>, config: &mut DecoderConfig) -> Result<()> {
    let factor = |field: &str| Ok(fields.positive(field)?.unwrap_or(1.0) as f32);
    config.embedding_scale = factor("embedding_multiplier")?;
    config.residual_scale = factor("residual_multiplier")?;
    config.logit_scale = 1.0 / factor("logits_scaling")?;
    let scale = factor("attention_multiplier")?;
    config.attention.iter_mut().for_each(|layer| layer.scale = scale);
    Ok(())
}

/// Reads the fields that Granite's GGUF files have, but for those of experts. They pair neighbours, as those of Llama do.
pub(super) fn decoder_from_gguf(keys: &Keys<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, architecture, &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Neighbours, false)?);
    let factor = |key: &str| {
        let missing = || ConfigError::Missing { field: keys.path(key) };
        keys.positive(key)?.ok_or_else(missing)
    };
    config.embedding_scale = factor("embedding_scale")?;
    config.residual_scale = factor("residual_scale")?;
    config.logit_scale = 1.0 / factor("logit_scale")?;
    let scale = factor("attention.scale")?;
    config.attention.iter_mut().for_each(|layer| layer.scale = scale);
    Ok(config)
}
