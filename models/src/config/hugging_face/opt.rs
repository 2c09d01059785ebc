//! OPT. Left out, `max_position_embeddings` is 2048, `word_embed_proj_dim` is `hidden_size`, `activation_function` relu,
//! norms stand in front and after the last layer, everything has biases, and the embedding is tied.

use super::{
    super::{
        Architecture, Biases, DecoderConfig, FieldNames, Norm, Result, ScoreDivisors, fields::Fields, limits,
    },
    activation, even_heads,
};
use dsrun_core::op::Nonlinearity;

/// Fields that are read.
pub(super) const READ: &[&str] = &[
    "_remove_final_layer_norm",
    "activation_function",
    "bos_token_id",
    "do_layer_norm_before",
    "enable_bias",
    "eos_token_id",
    "ffn_dim",
    "hidden_size",
    "layer_norm_elementwise_affine",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "tie_word_embeddings",
    "vocab_size",
    "word_embed_proj_dim",
];

/// Fields that do not change the logits.
pub(super) const NO_EFFECT: &[&str] = &["activation_dropout", "dropout", "init_std", "layerdrop"];

/// Added to the variance; no field says so.
const EPS: f32 = 1e-5;

/// Reads the fields.
pub(super) fn read(fields: Fields<'_>) -> Result<DecoderConfig> {
    let hidden = fields.required_size("hidden_size", limits::HIDDEN)?;
    let layers = fields.required_size("num_hidden_layers", limits::LAYERS)?;
    let heads = fields.required_size("num_attention_heads", limits::HEADS)?;
    let norm_before = fields.flag("do_layer_norm_before")?.unwrap_or(true);
    let removed = fields.flag("_remove_final_layer_norm")?.unwrap_or(false);
    let biases = match fields.flag("enable_bias")?.unwrap_or(true) {
        true => Biases { gate: false, ..Biases::ALL },
        false => Biases::default(),
    };
    let config = DecoderConfig {
        architecture: Architecture::Opt,
        hidden,
        layers,
        heads,
        kv_heads: heads,
        head_dim: even_heads(("num_attention_heads", heads), ("hidden_size", hidden))?,
        intermediate: fields.required_size("ffn_dim", limits::INTERMEDIATE)?,
        gated: false,
        vocabulary: fields.required_size("vocab_size", limits::VOCABULARY)?,
        embedding: fields.size("word_embed_proj_dim", 1, limits::HIDDEN)?.unwrap_or(hidden),
        norm: Norm::Layer { affine: fields.flag("layer_norm_elementwise_affine")?.unwrap_or(true) },
        eps: EPS,
        norm_after: !norm_before,
        // Norms behind the sums make one after the last layer superfluous.
        final_norm: norm_before && !removed,
        rope: None,
        score_divisors: ScoreDivisors { head_dim: true, layer: false },
        windows: vec![None; layers],
        biases,
        qk_norm: false,
        tied: fields.flag("tie_word_embeddings")?.unwrap_or(true),
        activation: activation(fields, "activation_function", Nonlinearity::Relu)?,
        context: fields.size("max_position_embeddings", 1, limits::CONTEXT)?.unwrap_or(2048),
        bos: fields.tokens("bos_token_id")?.first().copied(),
        eos: fields.tokens("eos_token_id")?,
    };
    config.validate_as(&FieldNames::OPT)?;
    Ok(config)
}
