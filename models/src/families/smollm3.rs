//! SmolLM3: Llama's layer, without a rotary embedding in every fourth layer.
//!
//! Defaults: `num_key_value_heads` 4, `max_position_embeddings` 32768, `rope_theta` 2000000, `no_rope_layer_interval` 4, tied
//! embedding. In `no_rope_layers`, 1 stands for a layer with a rotary embedding. With `use_sliding_window`, the layers
//! without one have a sliding window, or those that `layer_types` lists.
//!
//! GGUF files pair neighbours, as those of Llama do, and have no key for the interval.

use super::{
    architecture::{Architecture, Export, Gguf},
    llama::{self, LLAMA},
};
use crate::{
    config::{
        ConfigError, DecoderConfig, FieldNames, Result,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults},
        rope::json::{self as rope, RopeDefaults},
    },
    tensor_names::Names,
};
use dsrun_core::op::{Nonlinearity, RopePairing};
use serde_json::{Map, Value};

const NAMES: FieldNames = FieldNames::HUGGING_FACE;

/// SmolLM3.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "smollm3",
    config,
    harmless: &["max_window_layers"],
    gguf: Some(Gguf {
        name: "smollm3",
        config: from_gguf,
        tensors: Names::GGUF,
        export: Some(Export { class: "SmolLM3ForCausalLM", fields: own_fields }),
    }),
    ..LLAMA
}];

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { kv_heads: Some(4), context: 32_768, tied: true, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, "smollm3", &NAMES, &defaults)?;
    config.biases = llama::biases(fields)?;
    let defaults = RopeDefaults { theta: 2_000_000.0, ..RopeDefaults::of(&config) };
    config.rotate_all(rope::read(fields, defaults)?);
    let rotated = rotated_layers(fields, config.layers)?;
    leave_unrotated(&mut config, &rotated);
    let switched_on = fields.flag("use_sliding_window")?.unwrap_or(false);
    let window = hugging_face::sliding_window(fields, None)?.filter(|_| switched_on);
    config.set_windows(hugging_face::windows(fields, config.layers, window, |layer| !rotated[layer])?);
    config.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, "smollm3", &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Neighbours, false)?);
    gguf::no_window(keys, config.context)?;
    let rotated = every_but(config.layers, 4);
    leave_unrotated(&mut config, &rotated);
    config.checked(&FieldNames::GGUF)
}

/// Reads which layers have a rotary embedding.
pub(super) fn rotated_layers(fields: &Fields<'_>, layers: usize) -> Result<Vec<bool>> {
    let interval = fields.size("no_rope_layer_interval", 1, usize::MAX)?.unwrap_or(4);
    match fields.flags("no_rope_layers")? {
        None => Ok(every_but(layers, interval)),
        // transformers takes an empty list for none.
        Some(rotated) if rotated.is_empty() => Ok(every_but(layers, interval)),
        Some(rotated) if rotated.len() >= layers => Ok(rotated),
        Some(rotated) => {
            let expected = format!("one for each of {layers} layers (num_hidden_layers)");
            let found = format!("{} long", rotated.len());
            Err(ConfigError::value(fields.path("no_rope_layers"), found, expected))
        }
    }
}

/// Returns which layers have a rotary embedding if every n-th has none.
pub(super) fn every_but(layers: usize, interval: usize) -> Vec<bool> {
    (1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect()
}

pub(super) fn leave_unrotated(config: &mut DecoderConfig, rotated: &[bool]) {
    for (layer, rotated) in config.attention.iter_mut().zip(rotated) {
        layer.rope.take_if(|_| !rotated);
    }
}

fn own_fields(config: &DecoderConfig) -> Result<Map<String, Value>, &'static str> {
    let rotated = config.attention.iter().map(|layer| u8::from(layer.rope.is_some()));
    let mut fields = llama::bias_fields(config)?;
    fields.insert("no_rope_layers".into(), rotated.collect());
    Ok(fields)
}
