//! EXAONE 4: OLMo 2's layer with norms of each head.
//!
//! With a sliding window, three layers of four have it and a rotary embedding, and the others neither, or those that `layer_types`
//! lists. Without one, all layers have full attention and a rotary embedding.
//!
//! Defaults: `num_attention_heads` and `num_key_value_heads` 32, `max_position_embeddings` 2048, `rms_norm_eps` 1e-5, `sliding_window`
//! 4096, `sliding_window_pattern` 4.

use super::{
    architecture::{Architecture, Gguf},
    olmo::OLMO2,
};
use crate::{
    config::{
        ConfigError, DecoderConfig, FieldNames, Result,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults},
        rope::json::{self as rope, RopeDefaults},
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part},
};
use dsrun_core::{
    Result as CoreResult,
    op::{Nonlinearity, RopePairing},
    program::ValueId,
};
use serde_json::Value;

const NAMES: FieldNames = FieldNames::HUGGING_FACE;

/// EXAONE 4.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "exaone4",
    config,
    blocks: Blocks { layer, ..OLMO2.blocks },
    gguf: Some(Gguf { name: "exaone4", config: from_gguf, tensors: Names::GGUF, export: None }),
    writable: false,
    ..OLMO2
}];

/// Computes `x + norm(attention(x))`, then `x + norm(mlp(x))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let heads = build.heads(x)?;
        let heads = build.norm_heads(heads)?;
        let heads = build.rotate(heads)?;
        let y = build.attend(heads)?;
        build.norm(y, Part::AttentionPostNorm)
    })?;
    build.residual(x, |build, x| {
        let y = build.gated_mlp(x)?;
        build.norm(y, Part::MlpPostNorm)
    })
}

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { heads: Some(32), kv_heads: Some(32), eps: 1e-5, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, "exaone4", &NAMES, &defaults)?;
    config.rotate_all(rope::read(fields, RopeDefaults::of(&config))?);
    let window = hugging_face::sliding_window(fields, Some(4096))?;
    let sliding = pattern(fields)?;
    config.set_windows(hugging_face::windows(fields, config.layers, window, sliding)?);
    if window.is_some() {
        config.rotate_windows_only();
    }
    config.checked(&NAMES)
}

/// Reads which layers have a window: a number n for all but every n-th, or a text with a letter for each layer of a period, `L` for
/// those with a window.
fn pattern(fields: &Fields<'_>) -> Result<impl Fn(usize) -> bool> {
    const FIELD: &str = "sliding_window_pattern";
    let letters: Vec<bool> = match fields.value(FIELD) {
        Some(Value::String(letters))
            if letters.chars().all(|letter| matches!(letter, 'L' | 'G')) && !letters.is_empty() =>
        {
            letters.chars().map(|letter| letter == 'L').collect()
        }
        Some(Value::String(letters)) => {
            return Err(ConfigError::value(fields.path(FIELD), letters, "a number, or a text of L and G"));
        }
        _ => {
            let period = fields.size(FIELD, 1, 1 << 12)?.unwrap_or(4);
            (1..=period).map(|layer| layer != period).collect()
        }
    };
    Ok(move |layer: usize| letters[layer % letters.len()])
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, "exaone4", &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Halves, false)?);
    config.set_windows(gguf::windows(keys, config.layers, 4)?);
    if config.attention.iter().any(|layer| layer.window.is_some()) {
        config.rotate_windows_only();
    }
    config.checked(&FieldNames::GGUF)
}
