//! Gemma 1 and 2.
//!
//! Both store the weights of norms minus 1 and scale the embedding. Gemma 1 has Llama's layer. In Gemma 2, norms precede and follow
//! attention and MLP, scores and logits are bounded by soft caps, and every second layer, from the first on, has a sliding window, or
//! those that `layer_types` lists.
//!
//! | default of | gemma | gemma2 |
//! |---|---|---|
//! | `num_attention_heads`, `num_key_value_heads` | 16, 16 | 8, 4 |
//! | `sliding_window`, `query_pre_attn_scalar` | not read | 4096, 256 |
//! | `attn_logit_softcapping`, `final_logit_softcapping` | not read | 50, 30 |
//!
//! GGUF files have the weights of norms as they are, and no key for `query_pre_attn_scalar`, which is the head size in all models except
//! the one with 46 layers (27B).
//!
//! Further defaults of both: `head_dim` 256, `vocab_size` 256000, `max_position_embeddings` 8192, tanh-GELU, tied embedding.

use super::{
    architecture::{Architecture, Gguf},
    gemma::{self, SANDWICH},
    llama::{self, LLAMA},
};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Norm, Result,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults, expect},
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

const NAMES: FieldNames = FieldNames::HUGGING_FACE;
const NAMES_2: FieldNames = FieldNames { activation: "hidden_activation", ..NAMES };

const DEFAULTS: Defaults = Defaults {
    heads: Some(16),
    kv_heads: Some(16),
    head_dim: Some(256),
    vocabulary: Some(256_000),
    context: 8192,
    tied: true,
    activation: Nonlinearity::GeluTanh,
    ..Defaults::LLAMA
};

/// Gemma 1 and Gemma 2.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "gemma",
        config: gemma1,
        // Files of the first release have this beside `hidden_act`; transformers does not read it.
        harmless: &["hidden_activation"],
        blocks: Blocks { embed: |build, table| build.embed_by_width(table), layer: llama::layer },
        gguf: Some(Gguf { name: "gemma", config: gemma1_from_gguf, tensors: Names::GGUF, export: None }),
        writable: false,
        ..LLAMA
    },
    Architecture {
        name: "gemma2",
        config: gemma2,
        // Old files have the default of `hidden_act` beside `hidden_activation`, the window under two names, and a switch for the cache.
        harmless: &["cache_implementation", "hidden_act", "sliding_window_size"],
        tensors: Names { own: SANDWICH, ..Names::HUGGING_FACE },
        blocks: Blocks { embed: |build, table| build.embed_by_width(table), layer },
        gguf: Some(Gguf { name: "gemma2", config: gemma2_from_gguf, tensors: Names::GGUF, export: None }),
        writable: false,
    },
];

/// Computes `x + norm(attention(norm(x)))`, then `x + norm(mlp(norm(x)))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let x = build.norm(x, Part::AttentionNorm)?;
        let heads = build.heads(x)?;
        let heads = build.rotate(heads)?;
        let y = build.attend(heads)?;
        build.norm(y, Part::AttentionPostNorm)
    })?;
    gemma::mlp(build, x)
}

/// Reads what both have in common.
fn decoder(
    fields: &Fields<'_>,
    name: &'static str,
    names: &FieldNames,
    defaults: &Defaults,
) -> Result<DecoderConfig> {
    let mut config = hugging_face::decoder(fields, name, names, defaults)?;
    config.norm = Norm::Rms { weight_offset: 1.0 };
    config.biases = Biases::of(fields.flag("attention_bias")?.unwrap_or(false), false);
    config.rotate_all(rope::read(fields, RopeDefaults::of(&config))?);
    expect(fields, "use_bidirectional_attention", false.into(), "attention must be causal (false)")?;
    Ok(config)
}

fn gemma1(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let mut config = decoder(fields, "gemma", &NAMES, &DEFAULTS)?;
    // Files of the first release say gelu, and mean its approximation.
    if config.activation == Nonlinearity::GeluErf {
        config.activation = Nonlinearity::GeluTanh;
    }
    config.checked(&NAMES)
}

fn gemma2(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { heads: Some(8), kv_heads: Some(4), ..DEFAULTS };
    let mut config = decoder(fields, "gemma2", &NAMES_2, &defaults)?;
    config.scale_scores(fields.positive("query_pre_attn_scalar")?.unwrap_or(256.0));
    let window = hugging_face::required_sliding_window(fields, 4096)?;
    let sliding = |layer: usize| layer.is_multiple_of(2);
    config.set_windows(hugging_face::windows(fields, config.layers, Some(window), sliding)?);
    let cap = |field: &str, default: f32| match fields.is_null(field) {
        true => Ok(0.0),
        false => fields.positive(field).map(|cap| cap.map_or(default, |cap| cap as f32)),
    };
    config.score_cap = cap("attn_logit_softcapping", 50.0)?;
    config.logit_cap = cap("final_logit_softcapping", 30.0)?;
    config.checked(&NAMES_2)
}

fn decoder_from_gguf(keys: &Keys<'_>, name: &'static str) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, name, &FieldNames::GGUF, Nonlinearity::GeluTanh)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Halves, false)?);
    Ok(config)
}

fn gemma1_from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    decoder_from_gguf(keys, "gemma")?.checked(&FieldNames::GGUF)
}

fn gemma2_from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = decoder_from_gguf(keys, "gemma2")?;
    if config.layers == 46 {
        config.scale_scores(config.hidden as f64 / config.heads as f64);
    }
    config.set_windows(gguf::windows(keys, config.layers, 2)?);
    config.score_cap = keys.positive("attn_logit_softcapping")?.unwrap_or(0.0);
    config.logit_cap = keys.positive("final_logit_softcapping")?.unwrap_or(0.0);
    config.checked(&FieldNames::GGUF)
}
