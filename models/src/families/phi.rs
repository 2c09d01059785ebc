//! Phi-3, Phi-4 and Phi-4-mini: Llama's layer with fused matrices, partial rotation and LongRoPE.
//!
//! Files store queries, keys and values in one matrix, and gate and up in another.
//!
//! Defaults: `num_key_value_heads` the number of query heads, `max_position_embeddings` and
//! `original_max_position_embeddings` 4096, `rms_norm_eps` 1e-5, no sliding window.
//!
//! The sliding window of a GGUF file applies to every layer, as in the original models; llama.cpp ignores it.

use super::{
    architecture::{Architecture, Gguf},
    llama::LLAMA,
};
use crate::{
    config::{
        DecoderConfig, FieldNames, Result,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults, expect},
        limits,
        rope::json::{self as rope, RopeDefaults},
    },
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::op::{Nonlinearity, RopePairing};

const NAMES: FieldNames = FieldNames::HUGGING_FACE;

const HEADS: &[Part] = &[Part::Query, Part::Key, Part::Value];
const GATE_AND_UP: &[Part] = &[Part::Gate, Part::Up];

/// Phi-3 and later models in its form.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "phi3",
    config,
    harmless: &["auto_map", "embd_pdrop", "resid_pdrop"],
    tensors: Names {
        own: &[
            TensorName::of(HEADS, "layers.{}.self_attn.qkv_proj"),
            TensorName::of(GATE_AND_UP, "layers.{}.mlp.gate_up_proj"),
        ],
        ..Names::HUGGING_FACE
    },
    gguf: Some(Gguf {
        name: "phi3",
        config: from_gguf,
        tensors: Names {
            own: &[TensorName::of(HEADS, "blk.{}.attn_qkv"), TensorName::of(GATE_AND_UP, "blk.{}.ffn_up")],
            ..Names::GGUF
        },
        export: None,
    }),
    writable: false,
    ..LLAMA
}];

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { context: 4096, eps: 1e-5, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, "phi3", &NAMES, &defaults)?;
    let original = fields.size("original_max_position_embeddings", 1, limits::CONTEXT)?.unwrap_or(4096);
    let defaults =
        RopeDefaults { original_context: Some(original), partial: Some(1.0), ..RopeDefaults::of(&config) };
    config.rotate_all(rope::read(fields, defaults)?);
    let window = hugging_face::sliding_window(fields, None)?;
    config.set_windows(vec![window; config.layers]);
    for field in ["attention_bias", "lm_head_bias", "mlp_bias"] {
        expect(fields, field, false.into(), "Phi-3 has no biases (false)")?;
    }
    for field in ["full_attn_mod", "interpolate_factor"] {
        expect(fields, field, 1.into(), "only full attention in every layer is supported (1)")?;
    }
    config.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, "phi3", &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Halves, true)?);
    config.set_windows(vec![gguf::sliding_window(keys)?; config.layers]);
    config.checked(&FieldNames::GGUF)
}
