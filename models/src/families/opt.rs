//! OPT, which differs from GPT-2 mainly in its tensors.
//!
//! In the 350m model, norms follow the residual sums, and the embedding is narrower than the layers.
//!
//! Defaults: `max_position_embeddings` 2048, `word_embed_proj_dim` is `hidden_size`, `activation_function` relu, norms before
//! attention and MLP and after the last layer, biases everywhere, tied embedding. llama.cpp does not support OPT.

use super::architecture::Architecture;
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Norm, Result,
        fields::Fields,
        hugging_face::{self, Defaults},
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::{Result as CoreResult, op::Nonlinearity, program::ValueId};

/// OPT.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "opt",
    config,
    harmless: &["activation_dropout", "dropout", "init_std", "layerdrop"],
    tensors: Names {
        prefixes: &["model.", ""],
        own: TENSORS,
        shared: &[],
        no_weights: &["decoder.version"],
        other: None,
    },
    blocks: Blocks { embed, layer },
    gguf: None,
    writable: false,
}];

const TENSORS: &[TensorName] = &[
    TensorName::of(&[Part::Embedding], "decoder.embed_tokens"),
    // The first two rows were meant for padding.
    TensorName::of(&[Part::Positions], "decoder.embed_positions").after_unused(2),
    TensorName::of(&[Part::ProjectIn], "decoder.project_in"),
    TensorName::of(&[Part::ProjectOut], "decoder.project_out"),
    TensorName::of(&[Part::FinalNorm], "decoder.final_layer_norm"),
    TensorName::of(&[Part::Head], "lm_head"),
    TensorName::of(&[Part::AttentionNorm], "decoder.layers.{}.self_attn_layer_norm"),
    TensorName::of(&[Part::Query], "decoder.layers.{}.self_attn.q_proj"),
    TensorName::of(&[Part::Key], "decoder.layers.{}.self_attn.k_proj"),
    TensorName::of(&[Part::Value], "decoder.layers.{}.self_attn.v_proj"),
    TensorName::of(&[Part::Output], "decoder.layers.{}.self_attn.out_proj"),
    TensorName::of(&[Part::MlpNorm], "decoder.layers.{}.final_layer_norm"),
    TensorName::of(&[Part::Up], "decoder.layers.{}.fc1"),
    TensorName::of(&[Part::Down], "decoder.layers.{}.fc2"),
];

const NAMES: FieldNames = FieldNames {
    kv_heads: "num_attention_heads",
    head_dim: None,
    intermediate: "ffn_dim",
    embedding: "word_embed_proj_dim",
    eps: None,
    activation: "activation_function",
    ..FieldNames::HUGGING_FACE
};

/// Adds the embeddings of positions to those of tokens, which are projected if they are narrower.
fn embed(build: &mut Builder<'_>, table: ValueId) -> CoreResult<ValueId> {
    if build.config.embedding == build.config.hidden {
        return build.embed_with_positions(table);
    }
    let positions = build.matrix(Part::Positions)?;
    let narrow = build.embed(table)?;
    let x = build.linear(narrow, Part::ProjectIn)?;
    let positions = build.embed_positions(positions)?;
    build.add(x, positions, 1.0)
}

/// Computes GPT-2's layer, or `norm(x + attention(x))`, then `norm(x + mlp(x))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = normed_residual(build, x, Part::AttentionNorm, |build, x| {
        let heads = build.heads(x)?;
        build.attend(heads)
    })?;
    normed_residual(build, x, Part::MlpNorm, |build, x| build.mlp(x))
}

fn normed_residual(
    build: &mut Builder<'_>,
    x: ValueId,
    norm: Part,
    branch: fn(&mut Builder<'_>, ValueId) -> CoreResult<ValueId>,
) -> CoreResult<ValueId> {
    if build.config.norm_after {
        let sum = build.residual(x, branch)?;
        return build.norm(sum, norm);
    }
    build.residual(x, |build, x| {
        let x = build.norm(x, norm)?;
        branch(build, x)
    })
}

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    // No field holds the epsilon of the norms.
    let defaults = Defaults { eps: 1e-5, tied: true, activation: Nonlinearity::Relu, ..Defaults::LLAMA };
    let config = hugging_face::decoder(fields, "opt", &NAMES, &defaults)?;
    let norm_before = fields.flag("do_layer_norm_before")?.unwrap_or(true);
    let removed = fields.flag("_remove_final_layer_norm")?.unwrap_or(false);
    let biased = fields.flag("enable_bias")?.unwrap_or(true);
    let affine = fields.flag("layer_norm_elementwise_affine")?.unwrap_or(true);
    DecoderConfig {
        norm: Norm::Layer { weight: affine, bias: affine },
        norm_after: !norm_before,
        // Norms that follow the sums make one after the last layer superfluous.
        final_norm: norm_before && !removed,
        biases: Biases { gate: false, ..Biases::of(biased, biased) },
        ..config
    }
    .checked(&NAMES)
}
