//! OLMoE: Mixtral's layer with queries and keys normalised over all heads.
//!
//! The router computes the softmax over all experts; `norm_topk_prob` says whether the weights of the chosen ones are divided
//! by their sum.
//!
//! Defaults: `num_key_value_heads` the number of query heads, `max_position_embeddings` 4096, `rms_norm_eps` 1e-5,
//! `num_experts` 64, `num_experts_per_tok` 8. `intermediate_size` is that of an expert.

use super::{
    architecture::{Architecture, Gguf},
    mixtral::{self, MIXTRAL},
};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Result,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults, expect},
        mixture::{MixtureNames, SOFTMAX},
        mixture_fields::{self, MixtureDefaults},
        rope::json::{self as rope, RopeDefaults},
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part},
};
use dsrun_core::{
    Result as CoreResult,
    op::{Nonlinearity, RopePairing},
    program::ValueId,
};
use serde_json::Value;

const NAMES: FieldNames = FieldNames {
    mixture: MixtureNames { intermediate: "intermediate_size", ..MixtureNames::QWEN },
    ..FieldNames::HUGGING_FACE
};

/// OLMoE.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "olmoe",
    config,
    harmless: mixtral::HARMLESS,
    tensors: Names::HUGGING_FACE,
    blocks: Blocks { layer, ..MIXTRAL.blocks },
    gguf: Some(Gguf { name: "olmoe", config: from_gguf, tensors: Names::GGUF, export: None }),
    ..MIXTRAL
}];

/// Computes `x + attention(norm(x))`, then `x + experts(norm(x))`.
pub(super) fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let x = build.norm(x, Part::AttentionNorm)?;
        let heads = build.heads(x)?;
        let heads = build.norm_all_heads(heads)?;
        let heads = build.rotate(heads)?;
        build.attend(heads)
    })?;
    build.residual(x, |build, x| {
        let x = build.norm(x, Part::MlpNorm)?;
        build.experts_or_mlp(x)
    })
}

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { context: 4096, eps: 1e-5, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, "olmoe", &NAMES, &defaults)?;
    config.biases = Biases::of(fields.flag("attention_bias")?.unwrap_or(false), false);
    config.rotate_all(rope::read(fields, RopeDefaults::of(&config))?);
    expect(fields, "clip_qkv", Value::Null, "clipped queries, keys and values are not supported (null)")?;
    let defaults =
        MixtureDefaults { experts: Some(64), top_k: Some(8), intermediate: Some(config.intermediate) };
    let mut mixture = mixture_fields::read(fields, &NAMES.mixture, defaults, SOFTMAX, config.layers)?;
    mixture.renormalise(fields.flag("norm_topk_prob")?.unwrap_or(false));
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, "olmoe", &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Halves, false)?);
    gguf::no_window(keys, config.context)?;
    let mixture = mixture_fields::from_gguf(keys, Some(config.intermediate), SOFTMAX, config.layers)?;
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&FieldNames::GGUF)
}
