//! GPT-2: layer norms, biases everywhere, learned positions, an MLP without a gate.
//!
//! Its files store matrices as `[inputs, outputs]`, with queries, keys and values in one matrix.
//!
//! Defaults: `n_positions` 1024, `n_inner` four times `n_embd`, `layer_norm_epsilon` 1e-5, `activation_function` gelu_new,
//! tied embedding.

use super::architecture::{Architecture, Gguf};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Norm, Result,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults},
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::{Result as CoreResult, op::Nonlinearity, program::ValueId};

/// GPT-2 and the models that share its form.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "gpt2",
    config,
    harmless: &[
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
        // transformers does not read it any more; it repeats n_positions.
        "n_ctx",
        "n_special",
        "output_past",
        "predict_special_tokens",
        // Attention scores and their softmax are always computed in f32 at least.
        "reorder_and_upcast_attn",
        // These belong to the classification head.
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ],
    tensors: Names {
        prefixes: &["transformer.", ""],
        own: TENSORS,
        shared: &[],
        // Causal masks.
        no_weights: &[".attn.bias", ".attn.masked_bias"],
        other: None,
    },
    blocks: Blocks { embed: |build, table| build.embed_with_positions(table), layer },
    gguf: Some(Gguf {
        name: "gpt2",
        config: from_gguf,
        tensors: Names { own: &[TensorName::of(HEADS, "blk.{}.attn_qkv")], ..Names::GGUF },
        export: None,
    }),
    writable: false,
}];

const HEADS: &[Part] = &[Part::Query, Part::Key, Part::Value];

const TENSORS: &[TensorName] = &[
    TensorName::of(&[Part::Embedding], "wte"),
    TensorName::of(&[Part::Positions], "wpe"),
    TensorName::of(&[Part::FinalNorm], "ln_f"),
    TensorName::of(&[Part::Head], "lm_head"),
    TensorName::of(&[Part::AttentionNorm], "h.{}.ln_1"),
    TensorName::of(HEADS, "h.{}.attn.c_attn").transposed(),
    TensorName::of(&[Part::Output], "h.{}.attn.c_proj").transposed(),
    TensorName::of(&[Part::MlpNorm], "h.{}.ln_2"),
    TensorName::of(&[Part::Up], "h.{}.mlp.c_fc").transposed(),
    TensorName::of(&[Part::Down], "h.{}.mlp.c_proj").transposed(),
];

const NAMES: FieldNames = FieldNames {
    hidden: "n_embd",
    layers: "n_layer",
    heads: "n_head",
    kv_heads: "n_head",
    head_dim: None,
    intermediate: "n_inner",
    embedding: "n_embd",
    context: "n_positions",
    eps: Some("layer_norm_epsilon"),
    activation: "activation_function",
    ..FieldNames::HUGGING_FACE
};

/// Computes `x + attention(norm(x))`, then `x + mlp(norm(x))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let x = build.norm(x, Part::AttentionNorm)?;
        let heads = build.heads(x)?;
        build.attend(heads)
    })?;
    build.residual(x, |build, x| {
        let x = build.norm(x, Part::MlpNorm)?;
        build.mlp(x)
    })
}

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        mlp_ratio: Some(4),
        context: 1024,
        eps: 1e-5,
        tied: true,
        activation: Nonlinearity::GeluTanh,
        ..Defaults::LLAMA
    };
    let mut config = with_norms_and_biases(hugging_face::decoder(fields, "gpt2", &NAMES, &defaults)?);
    let by_head = fields.flag("scale_attn_weights")?.unwrap_or(true);
    let by_layer = fields.flag("scale_attn_by_inverse_layer_idx")?.unwrap_or(false);
    let divisor = if by_head { (config.head_dim as f64).sqrt() } else { 1.0 };
    for (layer, attention) in (1..).zip(&mut config.attention) {
        attention.scale = (1.0 / if by_layer { divisor * f64::from(layer) } else { divisor }) as f32;
    }
    config.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    // GGUF has no keys for the options that scale attention scores.
    let names = &FieldNames::GGUF_LAYER_NORM;
    with_norms_and_biases(gguf::decoder(keys, "gpt2", names, Nonlinearity::GeluTanh)?).checked(names)
}

/// Sets layer norms and the biases of all projections.
fn with_norms_and_biases(config: DecoderConfig) -> DecoderConfig {
    let biases = Biases { gate: false, ..Biases::ALL };
    DecoderConfig { norm: Norm::LAYER, biases, ..config }
}
