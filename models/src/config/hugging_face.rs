//! `config.json`, as Hugging Face transformers writes and reads it, up to version 4 and from version 5 on.
//!
//! A field that is left out means what transformers takes it for, which differs between architectures.

mod gpt2;
mod llama;
mod opt;

use super::{
    Architecture, ConfigError, DecoderConfig, Result,
    fields::{Fields, shortened},
};
use dsrun_core::op::Nonlinearity;
use serde_json::{Map, Value};

/// Fields that do not change the logits of any architecture, whatever they say.
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

/// Switches of other families that old files carry, which must be switched as they are here.
const FIXED: &[(&str, bool)] = &[
    ("add_cross_attention", false),
    ("is_decoder", false),
    ("is_encoder_decoder", false),
    ("learned_embeddings", true),
    ("scale_embeddings", false),
    ("tie_encoder_decoder", false),
    ("use_mrope", false),
];

/// Reads the content of a `config.json` file.
pub(super) fn read(bytes: &[u8]) -> Result<DecoderConfig> {
    let object: Map<String, Value> =
        serde_json::from_slice(bytes).map_err(|error| ConfigError::Json { message: error.to_string() })?;
    let fields = Fields::new(&object);
    let architecture = architecture(fields)?;
    match architecture {
        Architecture::Llama | Architecture::Mistral | Architecture::Qwen2 | Architecture::Qwen3 => {
            refuse_unknown(fields, architecture, &[llama::READ])?;
            llama::read(fields, architecture)
        }
        Architecture::Gpt2 => {
            refuse_unknown(fields, architecture, &[gpt2::READ, gpt2::NO_EFFECT])?;
            gpt2::read(fields)
        }
        Architecture::Opt => {
            refuse_unknown(fields, architecture, &[opt::READ, opt::NO_EFFECT])?;
            opt::read(fields)
        }
    }
}

fn architecture(fields: Fields<'_>) -> Result<Architecture> {
    let name =
        fields.text("model_type")?.ok_or_else(|| ConfigError::Missing { field: "model_type".into() })?;
    let unknown = || ConfigError::architecture("model_type", name, &Architecture::ALL);
    Architecture::from_name(name).ok_or_else(unknown)
}

/// Refuses fields that are neither among `known`, the architecture's own, nor known to change nothing.
fn refuse_unknown(fields: Fields<'_>, architecture: Architecture, known: &[&[&str]]) -> Result<()> {
    for (field, value) in fields.present() {
        let known = NO_EFFECT.contains(&field) || known.iter().any(|known| known.contains(&field));
        let fixed = FIXED.iter().any(|(name, wanted)| *name == field && *value == Value::Bool(*wanted));
        // An empty collection asks for nothing.
        let empty = value.as_object().is_some_and(Map::is_empty);
        // How the weights are stored, which [`super::Quantisation`] reads.
        let storage = field == "quantization_config";
        if known || fixed || empty || storage {
            continue;
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

/// The function of an MLP.
fn activation(fields: Fields<'_>, field: &str, default: Nonlinearity) -> Result<Nonlinearity> {
    match fields.text(field)? {
        None => Ok(default),
        Some("silu" | "swish") => Ok(Nonlinearity::Silu),
        Some("gelu") => Ok(Nonlinearity::GeluErf),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Nonlinearity::GeluTanh),
        Some("relu") => Ok(Nonlinearity::Relu),
        Some(other) => {
            let reason = "supported: silu, gelu, gelu_pytorch_tanh, gelu_new, relu";
            Err(ConfigError::unsupported(field, shortened(&other.into()), reason))
        }
    }
}

/// The size of heads that share the hidden size among them. `heads` is a field and its value, `hidden` too.
fn even_heads((field, heads): (&str, usize), (hidden_field, hidden): (&str, usize)) -> Result<usize> {
    if hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    Err(ConfigError::value(field, heads, format!("a divisor of {hidden} ({hidden_field})")))
}
