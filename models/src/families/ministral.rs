//! Ministral, Ministral 3, and Mistral Small 3.1 and later, whose checkpoints also take images.
//!
//! `ministral` is Llama with sliding windows in the layers that `layer_types` lists. `ministral3` multiplies queries by a factor that
//! grows with their position, from `llama_4_scaling_beta` in the table of its rotary embedding. `mistral3` is a checkpoint with images:
//! only its text model, of type `mistral` or `ministral3`, is read.
//!
//! | default of | ministral | ministral3 |
//! |---|---|---|
//! | `num_key_value_heads` | 8 | 8 |
//! | `head_dim` | `hidden_size` / heads | 128 |
//! | `max_position_embeddings`, `rms_norm_eps` | 131072, 1e-6 | 262144, 1e-5 |
//! | `sliding_window` | 4096 | none |

use super::{
    architecture::Architecture,
    llama::{LLAMA, mistral},
};
use crate::{
    config::{
        ConfigError, DecoderConfig, FieldNames, Result, Temperature,
        fields::Fields,
        hugging_face::{self, Defaults, TextModel},
        limits,
        rope::json::{self as rope, RopeDefaults},
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part},
};
use dsrun_core::{Result as CoreResult, program::ValueId};

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
    gguf: None,
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
