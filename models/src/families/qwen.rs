//! Qwen 2, 2.5 and 3 (dense), which differ from Llama in biases, norms of heads and sliding windows.
//!
//! Qwen 2 has biases on queries, keys and values; Qwen 3 normalises query and key heads. Both can have sliding windows, from
//! layer `max_window_layers` on or where `layer_types` says.
//!
//! | default of | qwen2 | qwen3 |
//! |---|---|---|
//! | `num_key_value_heads` | 32 | 32 |
//! | `head_dim` | `hidden_size` / heads | 128 |
//! | `max_position_embeddings` | 32768 | 32768 |
//! | `sliding_window`, `max_window_layers` | 4096, 28 | 4096, 28 |

use super::{
    architecture::{Architecture, Export, Gguf},
    llama::{self, LLAMA},
};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Result,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults},
        rope::json as rope,
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part},
};
use dsrun_core::{
    Result as CoreResult,
    op::{Nonlinearity, RopePairing},
    program::ValueId,
};
use serde_json::Map;

const NAMES: FieldNames = FieldNames::HUGGING_FACE;

const QWEN2_BIASES: Biases = Biases { output: false, ..Biases::of(true, false) };

/// Qwen 2 and Qwen 3.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "qwen2",
        config: |fields| {
            let config = qwen(fields, "qwen2", &DEFAULTS)?;
            DecoderConfig { biases: QWEN2_BIASES, ..config }.checked(&NAMES)
        },
        harmless: &["attention_bias", "mlp_bias"],
        gguf: Some(Gguf {
            name: "qwen2",
            config: |keys| {
                let config = qwen_gguf(keys, "qwen2")?;
                let biases = Biases { query: true, key: true, value: true, ..config.biases };
                DecoderConfig { biases, ..config }.checked(&FieldNames::GGUF)
            },
            tensors: Names::GGUF,
            export: Some(Export {
                class: "Qwen2ForCausalLM",
                fields: |config| match config.biases {
                    QWEN2_BIASES => Ok(Map::new()),
                    _ => Err("it has other biases than those of queries, keys and values"),
                },
            }),
        }),
        ..LLAMA
    },
    Architecture {
        name: "qwen3",
        config: |fields| {
            let config = qwen(fields, "qwen3", &Defaults { head_dim: Some(128), ..DEFAULTS })?;
            let attention = fields.flag("attention_bias")?.unwrap_or(false);
            DecoderConfig { biases: Biases::of(attention, false), ..config }.checked(&NAMES)
        },
        harmless: &["mlp_bias"],
        blocks: Blocks { layer: normed_heads_layer, ..LLAMA.blocks },
        gguf: Some(Gguf {
            name: "qwen3",
            config: |keys| qwen_gguf(keys, "qwen3")?.checked(&FieldNames::GGUF),
            tensors: Names::GGUF,
            export: Some(Export { class: "Qwen3ForCausalLM", fields: llama::attention_bias_field }),
        }),
        ..LLAMA
    },
];

const DEFAULTS: Defaults = Defaults { kv_heads: Some(32), context: 32_768, ..Defaults::LLAMA };

/// Computes Llama's layer with normalised query and key heads, and experts where the configuration has some.
pub(super) fn normed_heads_layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let x = build.norm(x, Part::AttentionNorm)?;
        let heads = build.heads(x)?;
        let heads = build.norm_heads(heads)?;
        let heads = build.rotate(heads)?;
        build.attend(heads)
    })?;
    build.residual(x, |build, x| {
        let x = build.norm(x, Part::MlpNorm)?;
        build.experts_or_mlp(x)
    })
}

fn qwen(fields: &Fields<'_>, architecture: &'static str, defaults: &Defaults) -> Result<DecoderConfig> {
    let mut config = hugging_face::decoder(fields, architecture, &NAMES, defaults)?;
    config.rotate_all(rope::read(fields, rope::RopeDefaults::of(&config))?);
    let switched_on = fields.flag("use_sliding_window")?.unwrap_or(false);
    let window = hugging_face::sliding_window(fields, Some(4096))?.filter(|_| switched_on);
    // Models without windows have any number here, so there is no upper bound.
    let first = fields.size("max_window_layers", 0, usize::MAX)?.unwrap_or(28);
    config.set_windows(hugging_face::windows(fields, config.layers, window, |layer| layer >= first)?);
    Ok(config)
}

fn qwen_gguf(keys: &Keys<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, architecture, &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Halves, false)?);
    gguf::no_window(keys, config.context)?;
    Ok(config)
}
