//! DeepSeek-V2, V3 and R1, and Kimi-K2 in GGUF files, which have one architecture for all.
//!
//! Files have the key and value projections of each head as matrices of their own, those of keys transposed. What a gain does to
//! scores is in the file divided by 10; rotated parts are not scaled.

use super::architecture::Gguf;
use crate::{
    config::{
        DecoderConfig, FieldNames, Result,
        gguf::{self, Keys},
        latent::LatentNames,
        latent_fields, mixture_fields,
    },
    tensor_names::Names,
};
use dsrun_core::op::{Nonlinearity, RopePairing, RouterScore};

const NAMES: FieldNames = FieldNames { head_dim: Some(LatentNames::GGUF.plain), ..FieldNames::GGUF };

/// The form of these models in GGUF files.
pub(super) const GGUF: Gguf =
    Gguf { name: "deepseek2", config: from_gguf, tensors: Names::GGUF, export: None };

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, "deepseek_v2", &NAMES, Nonlinearity::Silu)?;
    let latent = latent_fields::from_gguf(keys, config.head_dim)?;
    let mut rope = gguf::rope(keys, &config, RopePairing::Neighbours, true)?;
    // llama.cpp multiplies scores instead.
    rope.scale = 1.0;
    let gain = keys.positive("rope.scaling.yarn_log_multiplier")?.map_or(0.0, f64::from);
    let factor = keys.positive("rope.scaling.factor")?.map_or(1.0, f64::from);
    config.attend_to_latents(latent, rope, (1.0 + gain * factor.max(1.0).ln()).powi(2));
    let mixture = mixture_fields::deepseek_from_gguf(keys, config.layers)?;
    if mixture.route.score == RouterScore::Sigmoid {
        config.architecture = "deepseek_v3";
    }
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&NAMES)
}
