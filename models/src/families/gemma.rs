//! Gemma 3, text only.
//!
//! Norms precede and follow attention and MLP, query and key heads are normalised, and the embedding is scaled. All layers
//! but every sixth have a sliding window and a rotary embedding with a smaller base. `gemma3` is a checkpoint that also
//! takes images: only its text model is read.
//!
//! Defaults: `head_dim` 256, `num_attention_heads` 8, `num_key_value_heads` 4, `vocab_size` 262208, `max_position_embeddings`
//! 131072, `sliding_window` 4096, `sliding_window_pattern` 6, `query_pre_attn_scalar` 256, `rope_theta` 1000000,
//! `rope_local_base_freq` 10000, `hidden_activation` tanh-GELU, tied embedding.
//!
//! Norm weights are stored minus 1 in safetensors files, but not in GGUF files: llama.cpp's converter adds the 1. GGUF has no
//! key for `query_pre_attn_scalar`, which is the head size in all models except the one with 62 layers (27B).

use super::{
    architecture::{Architecture, Gguf},
    llama::LLAMA,
};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Norm, Result, Rope,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults, TextModel, expect},
        rope::{RopesByKind, json::RopeDefaults},
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::{
    Result as CoreResult,
    op::{Nonlinearity, RopePairing},
    program::ValueId,
};
use serde_json::Value;

const NAMES: FieldNames = FieldNames { activation: "hidden_activation", ..FieldNames::HUGGING_FACE };

/// The text model, and the text model inside a model that takes images.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    TEXT,
    Architecture {
        name: "gemma3",
        config: |fields| {
            let read = |text: &Fields<'_>| config(text, "gemma3");
            hugging_face::text_model(fields, &[TextModel { name: TEXT.name, harmless: TEXT.harmless, read }])
        },
        harmless: hugging_face::IMAGES,
        tensors: Names {
            prefixes: &["language_model.model.", "model.language_model."],
            no_weights: &["vision_tower.", "multi_modal_projector."],
            ..TEXT.tensors
        },
        gguf: None,
        writable: false,
        ..TEXT
    },
];

/// The names of norms that precede and follow attention and MLP.
pub(super) const SANDWICH: &[TensorName] = &[
    TensorName::of(&[Part::AttentionPostNorm], "layers.{}.post_attention_layernorm"),
    TensorName::of(&[Part::MlpNorm], "layers.{}.pre_feedforward_layernorm"),
    TensorName::of(&[Part::MlpPostNorm], "layers.{}.post_feedforward_layernorm"),
];

const TEXT: Architecture = Architecture {
    name: "gemma3_text",
    config: |fields| config(fields, "gemma3_text"),
    harmless: &["_sliding_window_pattern", "cache_implementation"],
    tensors: Names { own: SANDWICH, ..Names::HUGGING_FACE },
    blocks: Blocks { embed: |build, table| build.embed_by_width(table), layer },
    gguf: Some(Gguf { name: "gemma3", config: from_gguf, tensors: Names::GGUF, export: None }),
    ..LLAMA
};

/// Computes `x + norm(attention(norm(x)))`, then `x + norm(mlp(norm(x)))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let x = build.norm(x, Part::AttentionNorm)?;
        let heads = build.heads(x)?;
        let heads = build.norm_heads(heads)?;
        let heads = build.rotate(heads)?;
        let y = build.attend(heads)?;
        build.norm(y, Part::AttentionPostNorm)
    })?;
    mlp(build, x)
}

/// Computes `x + norm(mlp(norm(x)))`.
pub(super) fn mlp(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    build.residual(x, |build, x| {
        let x = build.norm(x, Part::MlpNorm)?;
        let y = build.gated_mlp(x)?;
        build.norm(y, Part::MlpPostNorm)
    })
}

fn config(fields: &Fields<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    let defaults = Defaults {
        heads: Some(8),
        kv_heads: Some(4),
        head_dim: Some(256),
        vocabulary: Some(262_208),
        context: 131_072,
        tied: true,
        activation: Nonlinearity::GeluTanh,
        ..Defaults::LLAMA
    };
    let mut config = hugging_face::decoder(fields, architecture, &NAMES, &defaults)?;
    config.norm = Norm::Rms { weight_offset: 1.0 };
    config.biases = Biases::of(fields.flag("attention_bias")?.unwrap_or(false), false);
    config.scale_scores(fields.positive("query_pre_attn_scalar")?.unwrap_or(256.0));
    let period = fields.size("sliding_window_pattern", 1, usize::MAX)?.unwrap_or(6);
    let window = hugging_face::required_sliding_window(fields, 4096)?;
    let sliding = |layer: usize| !(layer + 1).is_multiple_of(period);
    config.set_windows(hugging_face::windows(fields, config.layers, Some(window), sliding)?);
    let local = fields.positive("rope_local_base_freq")?.unwrap_or(10_000.0);
    let defaults = RopeDefaults { theta: 1_000_000.0, ..RopeDefaults::of(&config) };
    config.rotate_by_kind(RopesByKind::read(fields, Some(local), defaults)?);
    for field in ["attn_logit_softcapping", "final_logit_softcapping"] {
        expect(fields, field, Value::Null, "soft caps are not supported (null)")?;
    }
    expect(fields, "use_bidirectional_attention", false.into(), "attention must be causal (false)")?;
    config.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, "gemma3_text", &FieldNames::GGUF, Nonlinearity::GeluTanh)?;
    if config.layers == 62 {
        config.scale_scores(config.hidden as f64 / config.heads as f64);
    }
    config.set_windows(gguf::windows(keys, config.layers, 6)?);
    let full = gguf::rope(keys, &config, RopePairing::Halves, false)?;
    let theta = keys.positive("rope.freq_base_swa")?.map_or(10_000.0, f64::from);
    config.rotate_by_kind(RopesByKind { full, sliding: Rope::plain(theta, config.head_dim) });
    config.checked(&FieldNames::GGUF)
}
