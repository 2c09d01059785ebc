//! `config.json`.

use super::{Export, ExportError, Result, io_error};
use crate::{
    config::{DecoderConfig, RopeScaling},
    families,
};
use dsrun_core::{DType, op::Nonlinearity};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Writes the model's own configuration, or what a GGUF file says in its words, with `quantisation` in it.
pub(super) fn write(export: &Export<'_>, quantisation: &Option<Value>, folder: &Path) -> Result<()> {
    let mut config = match &export.files.config {
        Some(path) if export.gguf_path().is_none() => {
            let text = std::fs::read(path).map_err(io_error(path))?;
            serde_json::from_slice(&text).map_err(|error| ExportError::Config(error.to_string()))?
        }
        _ => of_decoder(export.model.config(), export.dense.unwrap_or(DType::F16))?,
    };
    config.remove("quantization_config");
    if let Some(quantisation) = quantisation {
        config.insert("quantization_config".to_owned(), quantisation.clone());
    }
    write_json(&folder.join("config.json"), &Value::Object(config))
}

pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    std::fs::write(path, format!("{value:#}\n")).map_err(io_error(path))
}

/// The number that is written as f32 numbers are, not with the digits of an f64.
fn short(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn of_decoder(config: &DecoderConfig, dense: DType) -> Result<Map<String, Value>> {
    let wrong = |what: &str| ExportError::Config(what.to_owned());
    let gguf = families::of(config)?.gguf.as_ref();
    let Some(family) = gguf.and_then(|gguf| gguf.export) else {
        return Err(wrong(
            "GGUF files of its family hold weights in another form; start from the safetensors files of the model",
        ));
    };
    if config.attention.iter().any(|layer| layer.window.is_some()) {
        return Err(wrong("it has sliding windows"));
    }
    let activation = match config.activation {
        Nonlinearity::Silu => "silu",
        Nonlinearity::GeluErf => "gelu",
        Nonlinearity::GeluTanh => "gelu_pytorch_tanh",
        Nonlinearity::Relu => "relu",
        Nonlinearity::QuickGelu => "quick_gelu",
        Nonlinearity::Tanh => "tanh",
    };
    let dtype = match dense {
        DType::F32 => "float32",
        DType::BF16 => "bfloat16",
        _ => "float16",
    };
    let mut fields = json!({
        "architectures": [family.class],
        "model_type": config.architecture,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": activation,
        "max_position_embeddings": config.context,
        "rms_norm_eps": short(config.eps),
        "tie_word_embeddings": config.tied,
        "vocab_size": config.vocabulary,
        "bos_token_id": config.bos,
        "torch_dtype": dtype,
    });
    fields["eos_token_id"] = match config.eos[..] {
        [] => Value::Null,
        [one] => one.into(),
        _ => json!(config.eos),
    };
    let ropes = config.ropes();
    if ropes.len() > 1 {
        return Err(wrong("its layers have different rotary embeddings"));
    }
    if let Some(rope) = ropes.first() {
        fields["rope_theta"] = rope.theta.into();
        fields["rope_scaling"] = match &rope.scaling {
            RopeScaling::None => Value::Null,
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context } => {
                json!({
                    "rope_type": "llama3", "factor": factor, "low_freq_factor": low_frequency_factor,
                    "high_freq_factor": high_frequency_factor, "original_max_position_embeddings": original_context,
                })
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_context } => {
                let mut yarn = json!({
                    "rope_type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow,
                    "original_max_position_embeddings": original_context, "attention_factor": short(rope.scale),
                });
                if !truncate {
                    yarn["truncate"] = false.into();
                }
                yarn
            }
            RopeScaling::Long { .. } => {
                return Err(wrong("its rotary embeddings are scaled as LongRoPE does"));
            }
            RopeScaling::Divisors(_) => {
                let reason = "its rotary frequencies are divided by numbers of the GGUF file (rope_freqs), which \
                              config.json has no place for; start from the safetensors files of the model";
                return Err(wrong(reason));
            }
        };
    }
    match fields {
        Value::Object(mut fields) => {
            fields.extend((family.fields)(config).map_err(wrong)?);
            Ok(fields)
        }
        _ => Err(wrong("it is no object")),
    }
}
