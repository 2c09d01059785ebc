//! GPT-NeoX and Pythia: attention and MLP beside each other, each behind its layer norm.
//!
//! Queries, keys and values are one matrix, in which those of a head follow each other; in GGUF files those of all heads do. With
//! `use_parallel_residual` false, the MLP follows attention.
//!
//! Defaults: `max_position_embeddings` 2048, `layer_norm_eps` 1e-5, `rotary_pct` 0.25, `rotary_emb_base` 10000, `hidden_act` GELU,
//! biases everywhere but in the head.

use super::architecture::{Architecture, Gguf};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Norm, Result,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults},
        rope::json::{self as rope, RopeDefaults},
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::{
    Result as CoreResult,
    op::{Nonlinearity, RopePairing},
    program::ValueId,
};

const NAMES: FieldNames = FieldNames {
    kv_heads: "num_attention_heads",
    head_dim: None,
    eps: Some("layer_norm_eps"),
    ..FieldNames::HUGGING_FACE
};

const HEADS: &[Part] = &[Part::Query, Part::Key, Part::Value];

/// GPT-NeoX with attention and MLP beside each other, or one behind the other.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "gpt_neox",
    config,
    harmless: &["attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob"],
    tensors: Names {
        prefixes: &["gpt_neox.", ""],
        own: &[
            TensorName::of(&[Part::Embedding], "embed_in"),
            TensorName::of(&[Part::FinalNorm], "final_layer_norm"),
            TensorName::of(&[Part::Head], "embed_out"),
            TensorName::of(&[Part::AttentionNorm], "layers.{}.input_layernorm"),
            TensorName::of(HEADS, "layers.{}.attention.query_key_value").interleaved_heads(),
            TensorName::of(&[Part::Output], "layers.{}.attention.dense"),
            TensorName::of(&[Part::MlpNorm], "layers.{}.post_attention_layernorm"),
            TensorName::of(&[Part::Up], "layers.{}.mlp.dense_h_to_4h"),
            TensorName::of(&[Part::Down], "layers.{}.mlp.dense_4h_to_h"),
        ],
        shared: &[],
        // Causal masks, and tables of the rotary embedding.
        no_weights: &[".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"],
        other: None,
    },
    blocks: Blocks { embed: |build, table| build.embed(table), layer },
    gguf: Some(Gguf {
        name: "gptneox",
        config: from_gguf,
        tensors: Names { own: &[TensorName::of(HEADS, "blk.{}.attn_qkv")], ..Names::GGUF },
        export: None,
    }),
    writable: false,
}];

/// Computes `x + attention(norm(x)) + mlp(norm(x))`, or `x + attention(norm(x))`, then `x + mlp(norm(x))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let normed = build.norm(x, Part::AttentionNorm)?;
    let heads = build.heads(normed)?;
    let heads = build.rotate(heads)?;
    let attended = build.attend(heads)?;
    if build.config.parallel {
        let normed = build.norm(x, Part::MlpNorm)?;
        let mlp = build.mlp(normed)?;
        return build.parallel_residual(x, attended, mlp);
    }
    let x = build.add(x, attended, 1.0)?;
    build.residual(x, |build, x| {
        let x = build.norm(x, Part::MlpNorm)?;
        build.mlp(x)
    })
}

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { eps: 1e-5, activation: Nonlinearity::GeluErf, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, "gpt_neox", &NAMES, &defaults)?;
    config.norm = Norm::LAYER;
    config.biases =
        Biases { gate: false, ..Biases::of(fields.flag("attention_bias")?.unwrap_or(true), true) };
    config.parallel = fields.flag("use_parallel_residual")?.unwrap_or(true);
    let theta = fields.positive("rotary_emb_base")?.unwrap_or(10_000.0);
    let part = fields.positive("rotary_pct")?.unwrap_or(0.25);
    let defaults = RopeDefaults { theta, partial: Some(part), ..RopeDefaults::of(&config) };
    config.rotate_all(rope::read(fields, defaults)?);
    config.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let names = &FieldNames::GGUF_LAYER_NORM;
    let mut config = gguf::decoder(keys, "gpt_neox", names, Nonlinearity::GeluErf)?;
    config.norm = Norm::LAYER;
    config.biases = Biases { gate: false, ..Biases::of(keys.has("blk.0.attn_qkv.bias"), true) };
    config.parallel = keys.get::<bool>("use_parallel_residual")?.unwrap_or(true);
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Halves, true)?);
    config.checked(names)
}
