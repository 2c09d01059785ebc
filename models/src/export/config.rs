//! `config.json`.

use super::{Export, ExportError, Result, io_error};
use crate::config::{Architecture, Biases, DecoderConfig, RopeScaling};
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
    let architecture = config.architecture;
    let class = match architecture {
        Architecture::Mistral => "MistralForCausalLM",
        Architecture::Qwen2 => "Qwen2ForCausalLM",
        Architecture::Qwen3 => "Qwen3ForCausalLM",
        _ => "LlamaForCausalLM",
    };
    if config.windows.iter().any(Option::is_some) {
        return Err(wrong("it has sliding windows"));
    }
    let activation = match config.activation {
        Nonlinearity::Silu => "silu",
        Nonlinearity::GeluErf => "gelu",
        Nonlinearity::GeluTanh => "gelu_pytorch_tanh",
        Nonlinearity::Relu => "relu",
    };
    let dtype = match dense {
        DType::F32 => "float32",
        DType::BF16 => "bfloat16",
        _ => "float16",
    };
    let mut fields = json!({
        "architectures": [class],
        "model_type": architecture.name(),
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
    let Biases { query, key, value, output, gate, up, down } = config.biases;
    let attention = [query, key, value, output];
    match architecture {
        Architecture::Qwen2
            if attention == [true, true, true, false] && ![gate, up, down].contains(&true) => {}
        Architecture::Llama | Architecture::Qwen3
            if attention == [query; 4] && [gate, up, down] == [gate; 3] =>
        {
            fields["attention_bias"] = query.into();
            if architecture == Architecture::Llama {
                fields["mlp_bias"] = gate.into();
            } else if gate {
                return Err(wrong("its MLP has biases"));
            }
        }
        Architecture::Mistral if config.biases == Biases::default() => fields["sliding_window"] = Value::Null,
        _ => return Err(wrong("some of its projections have biases, others not")),
    }
    if let Some(rope) = &config.rope {
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
            RopeScaling::Divisors(_) => {
                let reason = "its rotary frequencies are divided by numbers of the GGUF file (rope_freqs), which \
                              config.json has no place for; start from the safetensors files of the model";
                return Err(wrong(reason));
            }
        };
    }
    match fields {
        Value::Object(fields) => Ok(fields),
        _ => Err(wrong("it is no object")),
    }
}
