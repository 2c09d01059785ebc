//! Ministral, Ministral 3, and Mistral Small 3.1 and later, whose checkpoints also take images.
//!
//! `ministral` is Llama with sliding windows in the layers that `layer_types` lists. `ministral3` multiplies queries by a factor that
//! grows with their position, from `llama_4_scaling_beta` in the table of its rotary embedding. `mistral3` is a checkpoint with images:
//! only its text model, of type `mistral` or `ministral3`, is read.
//!
//! GGUF files of architecture `mistral3` are those of Ministral 3, and of Mistral Small 3.1 and later without their images; their queries
//! and keys are in the order of Llama's. The positions that share a factor of queries are as many as the original context of YaRN. There
//! is no such file of `ministral`, because llama.cpp does not convert it.
//!
//! | default of | ministral | ministral3 |
//! |---|---|---|
//! | `num_key_value_heads` | 8 | 8 |
//! | `head_dim` | `hidden_size` / heads | 128 |
//! | `max_position_embeddings`, `rms_norm_eps` | 131072, 1e-6 | 262144, 1e-5 |
//! | `sliding_window` | 4096 | none |

use super::{
    architecture::{Architecture, Gguf},
    llama::{LLAMA, mistral},
};
use crate::{
    config::{
        ConfigError, DecoderConfig, FieldNames, Result, Rope, RopeScaling, Temperature,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults, TextModel},
        limits,
        rope::{
            json::{self as rope, RopeDefaults},
            yarn_gain,
        },
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part},
};
use dsrun_core::{
    Result as CoreResult,
    op::{Nonlinearity, RopePairing},
    program::ValueId,
};

const NAMES: FieldNames = FieldNames::HUGGING_FACE;
const HARMLESS: &[&str] = &["attention_bias", "max_window_layers", "mlp_bias", "use_sliding_window"];
/// Fields of the table of Ministral 3's rotary embedding, besides those that all families have.
const IN_TABLE: &[&str] = &["mscale", "mscale_all_dim", "llama_4_scaling_beta", "max_position_embeddings"];

/// Ministral, Ministral 3, and Mistral 3.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "ministral",
        config: ministral,
        harmless: HARMLESS,
        gguf: None,
        writable: false,
        ..LLAMA
    },
    MINISTRAL3,
    Architecture {
        name: "mistral3",
        config: |fields| {
            let models = [
                TextModel {
                    name: "ministral3",
                    harmless: HARMLESS,
                    read: |text| ministral3(text, "mistral3"),
                },
                TextModel { name: "mistral", harmless: HARMLESS, read: |text| mistral(text, "mistral3") },
            ];
            hugging_face::text_model(fields, &models)
        },
        harmless: hugging_face::IMAGES,
        tensors: Names {
            prefixes: &["language_model.model.", "model.language_model."],
            no_weights: &["vision_tower.", "multi_modal_projector."],
            ..Names::HUGGING_FACE
        },
        ..MINISTRAL3
    },
];

const MINISTRAL3: Architecture = Architecture {
    name: "ministral3",
    config: |fields| ministral3(fields, "ministral3"),
    harmless: HARMLESS,
    blocks: Blocks { layer, ..LLAMA.blocks },
    gguf: Some(Gguf { name: "mistral3", config: from_gguf, tensors: Names::GGUF, export: None }),
    writable: false,
    ..LLAMA
};

/// Computes Llama's layer, whose queries are multiplied by the factors of their positions.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let x = build.norm(x, Part::AttentionNorm)?;
        let heads = build.heads(x)?;
        let heads = build.rotate(heads)?;
        let heads = build.tune_temperature(heads)?;
        build.attend(heads)
    })?;
    build.residual(x, |build, x| {
        let x = build.norm(x, Part::MlpNorm)?;
        build.gated_mlp(x)
    })
}

fn ministral(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { kv_heads: Some(8), context: 131_072, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, "ministral", &NAMES, &defaults)?;
    config.rotate_all(rope::read(fields, RopeDefaults::of(&config))?);
    let window = hugging_face::sliding_window(fields, Some(4096))?;
    config.set_windows(hugging_face::windows(fields, config.layers, window, |_| true)?);
    config.checked(&NAMES)
}

fn ministral3(fields: &Fields<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    let defaults =
        Defaults { kv_heads: Some(8), head_dim: Some(128), context: 262_144, eps: 1e-5, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, architecture, &NAMES, &defaults)?;
    let table = rope::table(fields)?;
    let missing = || ConfigError::Missing { field: fields.path("rope_parameters") };
    let table = table.ok_or_else(missing)?;
    let interval = table.required_size("original_max_position_embeddings", limits::CONTEXT)?;
    let growth = table.positive("llama_4_scaling_beta")?;
    let temperature = growth.map(|growth| Temperature { interval, offset: 0, growth: growth as f32 });
    let defaults = RopeDefaults { more: IN_TABLE, ..RopeDefaults::of(&config) };
    config.rotate_all(rope::read(fields, defaults)?);
    let window = hugging_face::sliding_window(fields, None)?;
    for layer in &mut config.attention {
        (layer.window, layer.temperature) = (window, temperature);
    }
    config.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let names = &FieldNames::GGUF;
    let mut config = gguf::decoder(keys, "mistral3", names, Nonlinearity::Silu)?;
    config.rotate_all(rope_from_gguf(keys, &config)?);
    gguf::no_window(keys, config.context)?;
    if let Some(growth) = positive_or_zero(keys, "attention.temperature_scale")? {
        config.architecture = MINISTRAL3.name;
        let interval = keys.size("rope.scaling.original_context_length", limits::CONTEXT)?;
        let interval = interval.unwrap_or(config.context);
        for layer in &mut config.attention {
            layer.temperature = Some(Temperature { interval, offset: 0, growth });
        }
    }
    config.checked(names)
}

/// Reads the rotary embedding. A multiplier `m` of YaRN's gain divides what is rotated by the gain of `mscale_all_dim`, which is `m`.
fn rope_from_gguf(keys: &Keys<'_>, config: &DecoderConfig) -> Result<Rope> {
    const MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";
    let mut rope = gguf::rope(keys, config, RopePairing::Neighbours, false)?;
    let multiplier = positive_or_zero(keys, MULTIPLIER)?;
    let (Some(multiplier), RopeScaling::Yarn { factor, .. }) = (multiplier, &rope.scaling) else {
        return Ok(rope);
    };
    let scale = (yarn_gain(*factor, 1.0) / yarn_gain(*factor, f64::from(multiplier))) as f32;
    for key in gguf::YARN_ATTENTION {
        if keys.positive(key)?.is_some_and(|other| other != scale) {
            return Err(ConfigError::Contradiction { first: keys.path(key), second: keys.path(MULTIPLIER) });
        }
    }
    rope.scale = scale;
    Ok(rope)
}

/// Reads a number that is above 0, or 0 for none.
fn positive_or_zero(keys: &Keys<'_>, key: &str) -> Result<Option<f32>> {
    match keys.get::<f32>(key)? {
        Some(0.0) => Ok(None),
        _ => keys.positive(key),
    }
}
