//! Llama 1 to 3.x, SmolLM2 and other models in their form, and Mistral 7B.
//!
//! Mistral is Llama with a sliding window in every layer.
//!
//! | default of | llama | mistral |
//! |---|---|---|
//! | `num_key_value_heads` | number of query heads | 8 |
//! | `max_position_embeddings` | 2048 | 131072 |
//! | `sliding_window` | not read | 4096 |
//!
//! GGUF files of architecture `llama`, which include Mistral's, order the rows of query and key matrices so that the two
//! elements of a rotated pair are neighbours. The rotary embedding pairs neighbours instead of reordering the rows, so
//! quantised blocks are read unchanged. A file of this architecture that has experts is Mixtral's.

use super::{
    architecture::{Architecture, Export, Gguf},
    mixtral,
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
use serde_json::{Map, Value};

const NAMES: FieldNames = FieldNames::HUGGING_FACE;

/// Llama and Mistral.
pub(super) const ARCHITECTURES: &[Architecture] = &[LLAMA, MISTRAL];

/// Llama; other families change only what differs.
pub(super) const LLAMA: Architecture = Architecture {
    name: "llama",
    config: llama,
    harmless: &["max_window_layers", "sliding_window", "use_sliding_window"],
    tensors: Names::HUGGING_FACE,
    blocks: Blocks { embed: |build, table| build.embed(table), layer },
    gguf: Some(Gguf {
        name: "llama",
        config: from_gguf,
        tensors: Names::GGUF,
        export: Some(Export { class: "LlamaForCausalLM", fields: bias_fields }),
    }),
    writable: true,
};

const MISTRAL: Architecture = Architecture {
    name: "mistral",
    config: |fields| mistral(fields, "mistral"),
    harmless: &["attention_bias", "max_window_layers", "mlp_bias", "use_sliding_window"],
    gguf: None,
    ..LLAMA
};

/// Computes `x + attention(norm(x))`, then `x + mlp(norm(x))`, or experts where the configuration has some.
pub(super) fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let x = build.norm(x, Part::AttentionNorm)?;
        let heads = build.heads(x)?;
        let heads = build.rotate(heads)?;
        build.attend(heads)
    })?;
    build.residual(x, |build, x| {
        let x = build.norm(x, Part::MlpNorm)?;
        build.experts_or_mlp(x)
    })
}

fn llama(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let mut config = hugging_face::decoder(fields, "llama", &NAMES, &Defaults::LLAMA)?;
    config.biases = biases(fields)?;
    config.rotate_all(rope::read(fields, rope::RopeDefaults::of(&config))?);
    // Llama has no sliding windows; `layer_types` may only confirm that.
    hugging_face::windows(fields, config.layers, None, |_| false)?;
    config.checked(&NAMES)
}

pub(super) fn mistral(fields: &Fields<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    let defaults = Defaults { kv_heads: Some(8), context: 131_072, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, architecture, &NAMES, &defaults)?;
    config.rotate_all(rope::read(fields, rope::RopeDefaults::of(&config))?);
    let window = hugging_face::sliding_window(fields, Some(4096))?;
    let windows = hugging_face::windows(fields, config.layers, window, |_| true)?;
    // transformers ignores `layer_types` of Mistral, so it may only confirm the other fields.
    if let Some(layer) = windows.iter().position(|listed| *listed != window) {
        return Err(hugging_face::window_contradiction(layer, "full_attention"));
    }
    config.set_windows(windows);
    config.checked(&NAMES)
}

/// Reads which projections have biases from `attention_bias` and `mlp_bias`.
pub(super) fn biases(fields: &Fields<'_>) -> Result<Biases> {
    let (attention, mlp) = (fields.flag("attention_bias")?, fields.flag("mlp_bias")?);
    Ok(Biases::of(attention.unwrap_or(false), mlp.unwrap_or(false)))
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    if keys.get::<u32>(FieldNames::GGUF.mixture.experts)?.is_some_and(|experts| experts > 0) {
        return mixtral::from_gguf(keys);
    }
    let mut config = gguf::decoder(keys, "llama", &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Neighbours, false)?);
    gguf::no_window(keys, config.context)?;
    config.checked(&FieldNames::GGUF)
}

/// Returns the fields `attention_bias` and `mlp_bias`.
pub(super) fn bias_fields(config: &DecoderConfig) -> Result<Map<String, Value>, &'static str> {
    let Biases { query, gate, .. } = config.biases;
    let fields = [("attention_bias".to_owned(), query.into()), ("mlp_bias".to_owned(), gate.into())];
    match config.biases == Biases::of(query, gate) {
        true => Ok(Map::from_iter(fields)),
        false => Err("some projections of its attention or MLP have biases, others do not"),
    }
}

/// Returns the field `attention_bias`, for families whose MLP never has biases.
pub(super) fn attention_bias_field(config: &DecoderConfig) -> Result<Map<String, Value>, &'static str> {
    let mut fields = bias_fields(config)?;
    match fields.remove("mlp_bias") {
        Some(Value::Bool(true)) => Err("its MLP has biases"),
        _ => Ok(fields),
    }
}
