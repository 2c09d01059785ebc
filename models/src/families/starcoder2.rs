//! StarCoder2: rotated heads, layer norms, and an MLP without a gate.
//!
//! Defaults: `num_attention_heads` 24, `num_key_value_heads` 2, `max_position_embeddings` 4096, `norm_epsilon` 1e-5, `hidden_act`
//! tanh-GELU, no sliding window, biases everywhere but in the head (`use_bias`), tied embedding.

use super::{
    architecture::{Architecture, Gguf},
    llama::LLAMA,
};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Norm, Result,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults, expect},
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

const NAMES: FieldNames =
    FieldNames { head_dim: None, eps: Some("norm_epsilon"), ..FieldNames::HUGGING_FACE };

/// StarCoder2.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "starcoder2",
    config,
    // Published files repeat some fields under the names of the first StarCoder.
    harmless: &[
        "activation_function",
        "attention_softmax_in_fp32",
        "embedding_dropout",
        "layer_norm_epsilon",
        "norm_type",
        "residual_dropout",
        "scale_attention_softmax_in_fp32",
    ],
    tensors: Names {
        own: &[
            TensorName::of(&[Part::Up], "layers.{}.mlp.c_fc"),
            TensorName::of(&[Part::Down], "layers.{}.mlp.c_proj"),
        ],
        ..Names::HUGGING_FACE
    },
    blocks: Blocks { layer, ..LLAMA.blocks },
    gguf: Some(Gguf { name: "starcoder2", config: from_gguf, tensors: Names::GGUF, export: None }),
    writable: false,
}];

/// Computes `x + attention(norm(x))`, then `x + mlp(norm(x))`, without a gate.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let x = build.norm(x, Part::AttentionNorm)?;
        let heads = build.heads(x)?;
        let heads = build.rotate(heads)?;
        build.attend(heads)
    })?;
    build.residual(x, |build, x| {
        let x = build.norm(x, Part::MlpNorm)?;
        build.mlp(x)
    })
}

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        heads: Some(24),
        kv_heads: Some(2),
        context: 4096,
        eps: 1e-5,
        tied: true,
        activation: Nonlinearity::GeluTanh,
        ..Defaults::LLAMA
    };
    let mut config = hugging_face::decoder(fields, "starcoder2", &NAMES, &defaults)?;
    let biased = fields.flag("use_bias")?.unwrap_or(true);
    config.norm = Norm::LAYER;
    expect(fields, "mlp_type", "default".into(), "the MLP has no gate (default)")?;
    expect(
        fields,
        "scale_attn_weights",
        true.into(),
        "scores are divided by the root of the head size (true)",
    )?;
    config.biases = Biases { gate: false, ..Biases::of(biased, biased) };
    config.rotate_all(rope::read(fields, RopeDefaults::of(&config))?);
    config.set_windows(vec![hugging_face::sliding_window(fields, None)?; config.layers]);
    config.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let names = &FieldNames::GGUF_LAYER_NORM;
    let mut config = gguf::decoder(keys, "starcoder2", names, Nonlinearity::GeluTanh)?;
    config.norm = Norm::LAYER;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Halves, false)?);
    // A window in the file applies to every layer.
    config.set_windows(gguf::windows(keys, config.layers, 0)?);
    config.checked(names)
}
