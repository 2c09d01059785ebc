//! GPT-2. Left out, `n_positions` is 1024, `n_inner` four times `n_embd`, `layer_norm_epsilon` 1e-5,
//! `activation_function` gelu_new, and the embedding is tied.

use super::{
    super::{
        Architecture, Biases, DecoderConfig, FieldNames, Norm, Result, ScoreDivisors, fields::Fields, limits,
    },
    activation, even_heads,
};
use dsrun_core::op::Nonlinearity;

/// Fields that are read.
pub(super) const READ: &[&str] = &[
    "activation_function",
    "bos_token_id",
    "eos_token_id",
    "layer_norm_epsilon",
    "model_type",
    "n_embd",
    "n_head",
    "n_inner",
    "n_layer",
    "n_positions",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "tie_word_embeddings",
    "vocab_size",
];

/// Fields that do not change the logits.
pub(super) const NO_EFFECT: &[&str] = &[
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    // Not read any more; it says what n_positions says.
    "n_ctx",
    "n_special",
    "output_past",
    "predict_special_tokens",
    // Scores and their softmax are always computed in f32 at least.
    "reorder_and_upcast_attn",
    // Of the head that classifies.
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
];

/// Reads the fields.
pub(super) fn read(fields: Fields<'_>) -> Result<DecoderConfig> {
    let hidden = fields.required_size("n_embd", limits::HIDDEN)?;
    let layers = fields.required_size("n_layer", limits::LAYERS)?;
    let heads = fields.required_size("n_head", limits::HEADS)?;
    let config = DecoderConfig {
        architecture: Architecture::Gpt2,
        hidden,
        layers,
        heads,
        kv_heads: heads,
        head_dim: even_heads(("n_head", heads), ("n_embd", hidden))?,
        intermediate: fields.size("n_inner", 1, limits::INTERMEDIATE)?.unwrap_or(4 * hidden),
        gated: false,
        vocabulary: fields.required_size("vocab_size", limits::VOCABULARY)?,
        embedding: hidden,
        norm: Norm::Layer { affine: true },
        eps: fields.positive("layer_norm_epsilon")?.unwrap_or(1e-5) as f32,
        norm_after: false,
        final_norm: true,
        rope: None,
        score_divisors: ScoreDivisors {
            head_dim: fields.flag("scale_attn_weights")?.unwrap_or(true),
            layer: fields.flag("scale_attn_by_inverse_layer_idx")?.unwrap_or(false),
        },
        windows: vec![None; layers],
        biases: Biases { gate: false, ..Biases::ALL },
        qk_norm: false,
        tied: fields.flag("tie_word_embeddings")?.unwrap_or(true),
        activation: activation(fields, "activation_function", Nonlinearity::GeluTanh)?,
        context: fields.size("n_positions", 1, limits::CONTEXT)?.unwrap_or(1024),
        bos: fields.tokens("bos_token_id")?.first().copied(),
        eos: fields.tokens("eos_token_id")?,
    };
    config.validate_as(&FieldNames::GPT2)?;
    Ok(config)
}
