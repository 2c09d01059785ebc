//! `config.json`, as Hugging Face transformers writes and reads it, up to version 4 and from version 5 on.
//!
//! What a field means that is left out is transformers' answer, which differs between architectures that are otherwise
//! alike:
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
    Architecture, Biases, ConfigError, DecoderConfig, FieldNames, Result,
    fields::{Fields, shortened},
    limits, rope,
};
use dsrun_core::op::Nonlinearity;
use serde_json::{Map, Value};

/// Fields that are read, by one of the architectures at least. One that does not read a field has no such switch, and a
/// tensor that would need it shows as one too many when weights are checked.
const READ: &[&str] = &[
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

/// Fields that do not change the logits of these architectures, whatever they say.
const NO_EFFECT: &[&str] = &[
    // Where the file comes from.
    "_name_or_path",
    "architectures",
    "finetuning_task",
    "is_llama_config",
    "task_specific_params",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    // Training.
    "attention_dropout",
    "gradient_checkpointing",
    "hidden_dropout",
    "initializer_range",
    "label2id",
    "id2label",
    "num_labels",
    "pretraining_tp",
    "problem_type",
    "router_aux_loss_coef",
    // How transformers runs and what it returns.
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attn_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "return_dict_in_generate",
    "output_scores",
    "tf_legacy_loss",
    "torch_dtype",
    "torchscript",
    "use_bfloat16",
    "use_cache",
    // Read by nobody, though SmolLM2's files have it.
    "rope_interleaved",
    // Sampling, in files from before generation_config.json.
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_sequence_length",
    "min_length",
    "model_max_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "pad_token_id",
    "prefix",
    "remove_invalid_values",
    "repetition_penalty",
    "sep_token_id",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
];

/// Switches of other families that old files carry, switched off.
const OFF: &[&str] =
    &["add_cross_attention", "is_decoder", "is_encoder_decoder", "tie_encoder_decoder", "use_mrope"];

/// Reads the content of a `config.json` file.
pub(super) fn read(bytes: &[u8]) -> Result<DecoderConfig> {
    let object: Map<String, Value> =
        serde_json::from_slice(bytes).map_err(|error| ConfigError::Json { message: error.to_string() })?;
    let fields = Fields::new(&object);
    let architecture = architecture(fields)?;
    refuse_unknown(fields, architecture)?;

    let hidden = fields.required_size("hidden_size", limits::HIDDEN)?;
    let layers = fields.required_size("num_hidden_layers", limits::LAYERS)?;
    let heads = fields.required_size("num_attention_heads", limits::HEADS)?;
    let context = fields.size("max_position_embeddings", 1, limits::CONTEXT)?.unwrap_or(match architecture {
        Architecture::Llama => 2048,
        Architecture::Mistral => 131_072,
        Architecture::Qwen2 | Architecture::Qwen3 => 32_768,
    });
    let config = DecoderConfig {
        architecture,
        hidden,
        layers,
        heads,
        kv_heads: kv_heads(fields, architecture, heads)?,
        head_dim: head_dim(fields, architecture, hidden, heads)?,
        intermediate: fields.required_size("intermediate_size", limits::INTERMEDIATE)?,
        vocabulary: fields.required_size("vocab_size", limits::VOCABULARY)?,
        eps: fields.positive("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        rope: rope::read(fields, architecture.name(), context)?,
        windows: windows(fields, architecture, layers)?,
        biases: biases(fields, architecture)?,
        qk_norm: architecture == Architecture::Qwen3,
        tied: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        activation: activation(fields)?,
        context,
        bos: fields.tokens("bos_token_id")?.first().copied(),
        eos: fields.tokens("eos_token_id")?,
    };
    config.validate_as(&FieldNames::HUGGING_FACE)?;
    Ok(config)
}

fn architecture(fields: Fields<'_>) -> Result<Architecture> {
    let name =
        fields.text("model_type")?.ok_or_else(|| ConfigError::Missing { field: "model_type".into() })?;
    Architecture::from_name(name).ok_or_else(|| ConfigError::Architecture {
        field: "model_type",
        found: name.chars().take(80).collect(),
    })
}

fn refuse_unknown(fields: Fields<'_>, architecture: Architecture) -> Result<()> {
    for (field, value) in fields.present() {
        let known = READ.contains(&field) || NO_EFFECT.contains(&field);
        let off = OFF.contains(&field) && value == &Value::Bool(false);
        // An empty collection asks for nothing.
        let empty = value.as_object().is_some_and(Map::is_empty);
        if known || off || empty {
            continue;
        }
        if field == "quantization_config" {
            let reason = "weights quantised by other tools cannot be read; use the original model, or a GGUF file of it";
            return Err(ConfigError::unsupported(field, shortened(value), reason));
        }
        let field = field.chars().take(80).collect();
        return Err(ConfigError::Unknown {
            field,
            value: shortened(value),
            architecture: architecture.name(),
        });
    }
    Ok(())
}

fn kv_heads(fields: Fields<'_>, architecture: Architecture, heads: usize) -> Result<usize> {
    let default = match architecture {
        _ if fields.is_null("num_key_value_heads") => heads,
        Architecture::Llama => heads,
        Architecture::Mistral => 8,
        Architecture::Qwen2 | Architecture::Qwen3 => 32,
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
        Architecture::Llama => Biases { gate: mlp, up: mlp, down: mlp, ..all },
        Architecture::Mistral => Biases::default(),
        Architecture::Qwen2 => Biases { query: true, key: true, value: true, ..Biases::default() },
        Architecture::Qwen3 => all,
    })
}

fn activation(fields: Fields<'_>) -> Result<Nonlinearity> {
    match fields.text("hidden_act")? {
        None | Some("silu") => Ok(Nonlinearity::Silu),
        Some("gelu") => Ok(Nonlinearity::GeluErf),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Nonlinearity::GeluTanh),
        Some("relu") => Ok(Nonlinearity::Relu),
        Some(other) => {
            let reason = "supported: silu, gelu, gelu_pytorch_tanh, gelu_new, relu";
            Err(ConfigError::unsupported("hidden_act", shortened(&other.into()), reason))
        }
    }
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
        Architecture::Llama => vec![None; layers],
        Architecture::Mistral => vec![window; layers],
        Architecture::Qwen2 | Architecture::Qwen3 => {
            let window = window.filter(|_| switched_on);
            (0..layers).map(|layer| window.filter(|_| layer >= first)).collect()
        }
    };
    let Some(types) = fields.texts("layer_types")? else { return Ok(windows) };
    if types.len() != layers {
        let expected = format!("one for each of {layers} layers (num_hidden_layers)");
        return Err(ConfigError::value("layer_types", format!("{} long", types.len()), expected));
    }
    let window = match architecture {
        Architecture::Llama => None,
        Architecture::Mistral => window,
        Architecture::Qwen2 | Architecture::Qwen3 => window.filter(|_| switched_on),
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
