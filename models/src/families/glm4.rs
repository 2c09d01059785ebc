//! GLM-4 without experts: norms around attention and MLP, and a rotary embedding of neighbours in half of each head.
//!
//! `glm4` has norms behind attention and MLP, too; `glm`, the form of the first GLM-4 9B and of GLM-Edge, has not.
//!
//! The GGUF architecture of `glm` is `chatglm`. Queries, keys and values are one matrix, or three in files that were converted from those
//! of transformers.
//!
//! Defaults: `num_key_value_heads` 2, `head_dim` 128, `max_position_embeddings` 131072, `rms_norm_eps` 1.5625e-7,
//! `partial_rotary_factor` 0.5, biases of queries, keys and values.

use super::{
    architecture::{Architecture, Gguf},
    llama::{self, LLAMA},
};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Result, Rope,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults},
        rope::json::{self as rope, RopeDefaults},
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::{
    Result as CoreResult,
    op::{Nonlinearity, RopePairing},
    program::ValueId,
};

const NAMES: FieldNames = FieldNames::HUGGING_FACE;

const HEADS: &[Part] = &[Part::Query, Part::Key, Part::Value];

const GGUF_GATE_AND_UP: TensorName = TensorName::of(&[Part::Gate, Part::Up], "blk.{}.ffn_up");

/// The names in GGUF files with a matrix for each of queries, keys and values.
static SEPARATE: Names = Names { own: &[GGUF_GATE_AND_UP], ..Names::GGUF };

const GATE_AND_UP: TensorName = TensorName::of(&[Part::Gate, Part::Up], "layers.{}.mlp.gate_up_proj");

/// GLM-4, of the first form and later.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "glm4",
        config: |fields| config(fields, "glm4"),
        tensors: Names {
            own: &[
                GATE_AND_UP,
                TensorName::of(&[Part::AttentionPostNorm], "layers.{}.post_self_attn_layernorm"),
                TensorName::of(&[Part::MlpPostNorm], "layers.{}.post_mlp_layernorm"),
            ],
            ..Names::HUGGING_FACE
        },
        blocks: Blocks { layer, ..LLAMA.blocks },
        gguf: Some(Gguf {
            name: "glm4",
            config: from_gguf,
            tensors: Names { own: &[GGUF_GATE_AND_UP], ..Names::GGUF },
            export: None,
        }),
        ..GLM
    },
    GLM,
];

const GLM: Architecture = Architecture {
    name: "glm",
    config: |fields| config(fields, "glm"),
    harmless: &[],
    tensors: Names { own: &[GATE_AND_UP], ..Names::HUGGING_FACE },
    blocks: Blocks { layer: llama::layer, ..LLAMA.blocks },
    gguf: Some(Gguf {
        name: "chatglm",
        config: chatglm_from_gguf,
        tensors: Names {
            own: &[TensorName::of(HEADS, "blk.{}.attn_qkv"), GGUF_GATE_AND_UP],
            other: Some((Part::Query, &SEPARATE)),
            ..Names::GGUF
        },
        export: None,
    }),
    writable: false,
};

/// Computes `x + norm(attention(norm(x)))`, then `x + norm(mlp(norm(x)))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let x = build.norm(x, Part::AttentionNorm)?;
        let heads = build.heads(x)?;
        let heads = build.rotate(heads)?;
        let y = build.attend(heads)?;
        build.norm(y, Part::AttentionPostNorm)
    })?;
    build.residual(x, |build, x| {
        let x = build.norm(x, Part::MlpNorm)?;
        let y = build.gated_mlp(x)?;
        build.norm(y, Part::MlpPostNorm)
    })
}

fn config(fields: &Fields<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    let defaults = Defaults {
        kv_heads: Some(2),
        head_dim: Some(128),
        context: 131_072,
        eps: 1.5625e-7,
        ..Defaults::LLAMA
    };
    let mut config = hugging_face::decoder(fields, architecture, &NAMES, &defaults)?;
    let biases = Biases::of(fields.flag("attention_bias")?.unwrap_or(true), false);
    config.biases = Biases { output: false, ..biases };
    let defaults = RopeDefaults { partial: Some(0.5), ..RopeDefaults::of(&config) };
    let rope = rope::read(fields, defaults)?;
    config.rotate_all(Rope { pairing: RopePairing::Neighbours, ..rope });
    config.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, "glm4", &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Neighbours, true)?);
    config.checked(&FieldNames::GGUF)
}

fn chatglm_from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, "glm", &FieldNames::GGUF, Nonlinearity::Silu)?;
    if keys.has("blk.0.attn_qkv.bias") {
        config.biases = Biases { query: true, key: true, value: true, ..config.biases };
    }
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Neighbours, true)?);
    config.checked(&FieldNames::GGUF)
}
