//! The Llama family. What a field means that is left out differs between architectures that are otherwise alike:
//!
//! | field | llama | mistral | qwen2 | qwen3 |
//! |---|---|---|---|---|
//! | `num_key_value_heads` | as many as heads | 8 | 32 | 32 |
//! | `head_dim` | `hidden_size` / heads | the same | the same | 128 |
//! | `max_position_embeddings` | 2048 | 131072 | 32768 | 32768 |
//! | `sliding_window` | not read | 4096 | 4096 | 4096 |
//! | `max_window_layers` | not read | not read | 28 | 28 |
//! | `rms_norm_eps`, `rope_theta`, `hidden_act`, `tie_word_embeddings` | 1e-6, 10000, silu, false | | | |

use super::{
    super::{
        Architecture, Biases, ConfigError, DecoderConfig, FieldNames, Norm, Result, ScoreDivisors,
        fields::{Fields, shortened},
        limits, rope,
    },
    activation,
};
use dsrun_core::op::Nonlinearity;

/// Fields that are read, by one of the architectures at least. One that does not read a field has no such switch, and a
/// tensor that would need it shows as one too many when weights are checked.
pub(super) const READ: &[&str] = &[
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
];

/// Reads the fields of a model of the family.
pub(super) fn read(fields: Fields<'_>, architecture: Architecture) -> Result<DecoderConfig> {
    let hidden = fields.required_size("hidden_size", limits::HIDDEN)?;
    let layers = fields.required_size("num_hidden_layers", limits::LAYERS)?;
    let heads = fields.required_size("num_attention_heads", limits::HEADS)?;
    let context = fields.size("max_position_embeddings", 1, limits::CONTEXT)?.unwrap_or(match architecture {
        Architecture::Mistral => 131_072,
        Architecture::Qwen2 | Architecture::Qwen3 => 32_768,
        _ => 2048,
    });
    let config = DecoderConfig {
        architecture,
        hidden,
        layers,
        heads,
        kv_heads: kv_heads(fields, architecture, heads)?,
        head_dim: head_dim(fields, architecture, hidden, heads)?,
        intermediate: fields.required_size("intermediate_size", limits::INTERMEDIATE)?,
        gated: true,
        vocabulary: fields.required_size("vocab_size", limits::VOCABULARY)?,
        embedding: hidden,
        norm: Norm::Rms,
        norm_after: false,
        final_norm: true,
        eps: fields.positive("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        rope: Some(rope::read(fields, architecture.name(), context)?),
        score_divisors: ScoreDivisors { head_dim: true, layer: false },
        windows: windows(fields, architecture, layers)?,
        biases: biases(fields, architecture)?,
        qk_norm: architecture == Architecture::Qwen3,
        tied: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        activation: activation(fields, "hidden_act", Nonlinearity::Silu)?,
        context,
        bos: fields.tokens("bos_token_id")?.first().copied(),
        eos: fields.tokens("eos_token_id")?,
    };
    config.validate_as(&FieldNames::LLAMA)?;
    Ok(config)
}

fn kv_heads(fields: Fields<'_>, architecture: Architecture, heads: usize) -> Result<usize> {
    let default = match architecture {
        _ if fields.is_null("num_key_value_heads") => heads,
        Architecture::Mistral => 8,
        Architecture::Qwen2 | Architecture::Qwen3 => 32,
        _ => heads,
    };
    Ok(fields.size("num_key_value_heads", 1, limits::HEADS)?.unwrap_or(default))
}

fn head_dim(fields: Fields<'_>, architecture: Architecture, hidden: usize, heads: usize) -> Result<usize> {
    if let Some(head_dim) = fields.size("head_dim", 1, limits::HEAD_DIM)? {
        return Ok(head_dim);
    }
    match architecture {
        Architecture::Qwen3 if fields.is_null("head_dim") => {
            Err(ConfigError::value("head_dim", "null", "a whole number (it is 128 if left out)"))
        }
        Architecture::Qwen3 => Ok(128),
        _ if hidden.is_multiple_of(heads) => Ok(hidden / heads),
        _ => {
            let expected = format!("a divisor of {hidden} (hidden_size), as there is no head_dim");
            Err(ConfigError::value("num_attention_heads", heads, expected))
        }
    }
}

fn biases(fields: Fields<'_>, architecture: Architecture) -> Result<Biases> {
    let (attention, mlp) = (fields.flag("attention_bias")?, fields.flag("mlp_bias")?);
    let (attention, mlp) = (attention.unwrap_or(false), mlp.unwrap_or(false));
    let all =
        Biases { query: attention, key: attention, value: attention, output: attention, ..Biases::default() };
    Ok(match architecture {
        Architecture::Mistral => Biases::default(),
        Architecture::Qwen2 => Biases { query: true, key: true, value: true, ..Biases::default() },
        Architecture::Qwen3 => all,
        _ => Biases { gate: mlp, up: mlp, down: mlp, ..all },
    })
}

/// How many keys each layer's queries see, themselves included.
fn windows(fields: Fields<'_>, architecture: Architecture, layers: usize) -> Result<Vec<Option<u32>>> {
    let window = match fields.size("sliding_window", 0, limits::CONTEXT)? {
        // Only an architecture that reads the field can be confused by a window of no keys.
        Some(0) if architecture != Architecture::Llama => {
            return Err(ConfigError::value("sliding_window", 0, "a whole number from 1, or null for none"));
        }
        Some(window) => u32::try_from(window).ok(),
        None if fields.is_null("sliding_window") => None,
        None => Some(4096),
    };
    let switched_on = fields.flag("use_sliding_window")?.unwrap_or(false);
    // A model may have any number of layers before its first windowed one, so there is no upper bound.
    let first = fields.size("max_window_layers", 0, usize::MAX)?.unwrap_or(28);
    let windows = match architecture {
        Architecture::Mistral => vec![window; layers],
        Architecture::Qwen2 | Architecture::Qwen3 => {
            let window = window.filter(|_| switched_on);
            (0..layers).map(|layer| window.filter(|_| layer >= first)).collect()
        }
        _ => vec![None; layers],
    };
    let Some(types) = fields.texts("layer_types")? else { return Ok(windows) };
    if types.len() != layers {
        let expected = format!("one for each of {layers} layers (num_hidden_layers)");
        return Err(ConfigError::value("layer_types", format!("{} long", types.len()), expected));
    }
    let window = match architecture {
        Architecture::Mistral => window,
        Architecture::Qwen2 | Architecture::Qwen3 => window.filter(|_| switched_on),
        _ => None,
    };
    let of_layer = |(layer, kind): (usize, &&str)| match *kind {
        // Mistral has no such field: there it may only say what is so anyway.
        "full_attention" if architecture == Architecture::Mistral && window.is_some() => {
            Err(contradiction(layer, kind))
        }
        "full_attention" => Ok(None),
        "sliding_attention" if window.is_some() => Ok(window),
        "sliding_attention" => Err(contradiction(layer, kind)),
        other => {
            let reason = "layers can be full_attention or sliding_attention";
            Err(ConfigError::unsupported(format!("layer_types[{layer}]"), shortened(&other.into()), reason))
        }
    };
    types.iter().enumerate().map(of_layer).collect()
}

fn contradiction(layer: usize, kind: &str) -> ConfigError {
    ConfigError::Contradiction {
        first: format!("layer_types[{layer}] = \"{kind}\""),
        second: "the sliding window that the other fields (sliding_window, use_sliding_window) say".into(),
    }
}
