//! The Llama family.
//!
//! Files of architecture `llama` have the rows of the query and key matrices in another order than the Hugging Face
//! originals: the two elements of a rotated pair are neighbours. The rows are used as they lie, and the rotation pairs
//! neighbours, so quantised blocks are read without being touched.

use super::{
    super::{
        Architecture, Biases, ConfigError, DecoderConfig, FieldNames, Norm, Result, Rope, RopeScaling,
        ScoreDivisors, limits,
    },
    Keys, end_tokens, shown,
};
use crate::{gguf::Value, weights::TensorSource};
use dsrun_core::op::{Nonlinearity, RopePairing};

/// Keys that are read, without the architecture in front.
const READ: &[&str] = &[
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
];

/// The tensor of divisors of rotary frequencies.
pub(crate) const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// Reads the keys of a model of the family.
pub(super) fn read(keys: &Keys<'_>) -> Result<DecoderConfig> {
    keys.refuse_unknown(READ)?;
    let hidden = keys.required_size("embedding_length", limits::HIDDEN)?;
    let heads = keys.required_size("attention.head_count", limits::HEADS)?;
    let layers = keys.required_size("block_count", limits::LAYERS)?;
    let context = keys.required_size("context_length", limits::CONTEXT)?;
    let head_dim = head_dim(keys, hidden, heads)?;
    no_window(keys, context)?;
    let always = keys.architecture == Architecture::Qwen2;
    let bias = |part: &str| keys.has(&format!("blk.0.{part}.bias"));
    let config = DecoderConfig {
        architecture: keys.architecture,
        hidden,
        layers,
        heads,
        kv_heads: keys.size("attention.head_count_kv", limits::HEADS)?.unwrap_or(heads),
        head_dim,
        intermediate: keys.required_size("feed_forward_length", limits::INTERMEDIATE)?,
        gated: true,
        vocabulary: keys.vocabulary()?,
        embedding: hidden,
        norm: Norm::Rms,
        eps: keys.eps("attention.layer_norm_rms_epsilon")?,
        norm_after: false,
        final_norm: true,
        rope: Some(rope(keys, head_dim)?),
        score_divisors: ScoreDivisors { head_dim: true, layer: false },
        windows: vec![None; layers],
        biases: Biases {
            query: always || bias("attn_q"),
            key: always || bias("attn_k"),
            value: always || bias("attn_v"),
            output: bias("attn_output"),
            gate: bias("ffn_gate"),
            up: bias("ffn_up"),
            down: bias("ffn_down"),
        },
        qk_norm: keys.architecture == Architecture::Qwen3,
        tied: !keys.has("output.weight"),
        activation: Nonlinearity::Silu,
        context,
        bos: keys.bos()?,
        eos: end_tokens(keys.file)?,
    };
    config.validate_as(&FieldNames::GGUF)?;
    Ok(config)
}

fn head_dim(keys: &Keys<'_>, hidden: usize, heads: usize) -> Result<usize> {
    let head_dim = match keys.size("attention.key_length", limits::HEAD_DIM)? {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let expected =
                format!("a divisor of {hidden} (embedding_length), as there is no attention.key_length");
            return Err(ConfigError::value(keys.path("attention.head_count"), heads, expected));
        }
    };
    for key in ["attention.value_length", "rope.dimension_count"] {
        if let Some(other) = keys.size(key, limits::HEAD_DIM)?.filter(|other| *other != head_dim) {
            let reason = format!("it must be the size of a head, {head_dim}");
            return Err(ConfigError::unsupported(keys.path(key), other, reason));
        }
    }
    Ok(head_dim)
}

/// The format has a key for the size of a window, but does not say which layers have one.
fn no_window(keys: &Keys<'_>, context: usize) -> Result<()> {
    match keys.get::<usize>("attention.sliding_window")? {
        Some(window) if window != 0 && window < context => {
            let reason =
                "GGUF files do not say which layers have a window; use the model's safetensors files";
            Err(ConfigError::unsupported(keys.path("attention.sliding_window"), window, reason))
        }
        _ => Ok(()),
    }
}

fn rope(keys: &Keys<'_>, head_dim: usize) -> Result<Rope> {
    let pairing =
        if keys.architecture == Architecture::Llama { RopePairing::Neighbours } else { RopePairing::Halves };
    let theta = keys.positive("rope.freq_base")?.map_or(10_000.0, f64::from);
    let factor = match keys.positive("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => keys.positive("rope.scale_linear")?,
    };
    let scaling = match (keys.get::<&str>("rope.scaling.type")?, factor) {
        (Some("none"), _) | (None, None) => RopeScaling::None,
        (Some("linear") | None, Some(factor)) => RopeScaling::Linear { factor: f64::from(factor) },
        (Some("linear"), None) => {
            return Err(ConfigError::Missing { field: keys.path("rope.scaling.factor") });
        }
        (Some(other), _) => {
            let (kind, reason) =
                (shown(Value::String(other)), "rotary embeddings can be scaled as none or linear");
            return Err(ConfigError::unsupported(keys.path("rope.scaling.type"), kind, reason));
        }
    };
    let scaling = match (divisors(keys, head_dim)?, scaling) {
        (None, scaling) => scaling,
        (Some(divisors), RopeScaling::None) => RopeScaling::Divisors(divisors),
        (Some(_), _) => {
            return Err(ConfigError::Contradiction {
                first: keys.path("rope.scaling.type"),
                second: format!("the tensor {ROPE_DIVISORS}"),
            });
        }
    };
    Ok(Rope { theta, scaling, pairing })
}

/// The divisors of the rotary frequencies, one for each pair of a head.
fn divisors(keys: &Keys<'_>, head_dim: usize) -> Result<Option<Vec<f32>>> {
    let Some(tensor) = keys.file.tensor(ROPE_DIVISORS) else { return Ok(None) };
    if tensor.shape != [head_dim / 2] {
        let expected = format!("of shape [{}], half of a head", head_dim / 2);
        return Err(ConfigError::value(ROPE_DIVISORS, format!("of shape {:?}", tensor.shape), expected));
    }
    let unreadable = |error: dsrun_core::Error| ConfigError::value(ROPE_DIVISORS, error, "readable");
    let weight_type = keys.file.tensor_type(ROPE_DIVISORS).map_err(unreadable)?;
    let mut divisors = vec![0.0; head_dim / 2];
    let row = keys.file.rows(ROPE_DIVISORS, 0, 1).map_err(unreadable)?;
    weight_type.format.decode_row(&row, &mut divisors).map_err(unreadable)?;
    Ok(Some(divisors))
}
