//! GPT-2.

use super::{
    super::{Biases, ConfigError, DecoderConfig, FieldNames, Norm, Result, ScoreDivisors, limits},
    Keys, end_tokens,
};
use dsrun_core::op::Nonlinearity;

/// Keys that are read, without the architecture in front.
const READ: &[&str] = &[
    "attention.head_count",
    "attention.layer_norm_epsilon",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
];

/// Reads the keys.
pub(super) fn read(keys: &Keys<'_>) -> Result<DecoderConfig> {
    keys.refuse_unknown(READ)?;
    let hidden = keys.required_size("embedding_length", limits::HIDDEN)?;
    let heads = keys.required_size("attention.head_count", limits::HEADS)?;
    let layers = keys.required_size("block_count", limits::LAYERS)?;
    if !hidden.is_multiple_of(heads) {
        let expected = format!("a divisor of {hidden} (embedding_length)");
        return Err(ConfigError::value(keys.path("attention.head_count"), heads, expected));
    }
    let config = DecoderConfig {
        architecture: keys.architecture,
        hidden,
        layers,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        intermediate: keys.required_size("feed_forward_length", limits::INTERMEDIATE)?,
        gated: false,
        vocabulary: keys.vocabulary()?,
        embedding: hidden,
        norm: Norm::Layer { affine: true },
        eps: keys.eps("attention.layer_norm_epsilon")?,
        norm_after: false,
        final_norm: true,
        rope: None,
        // The format has no key that says otherwise.
        score_divisors: ScoreDivisors { head_dim: true, layer: false },
        windows: vec![None; layers],
        biases: Biases { gate: false, ..Biases::ALL },
        qk_norm: false,
        tied: !keys.has("output.weight"),
        activation: Nonlinearity::GeluTanh,
        context: keys.required_size("context_length", limits::CONTEXT)?,
        bos: keys.bos()?,
        eos: end_tokens(keys.file)?,
    };
    config.validate_as(&FieldNames::GGUF)?;
    Ok(config)
}
