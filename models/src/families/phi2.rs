//! Phi-1, Phi-1.5 and Phi-2: attention and MLP beside each other behind one layer norm.
//!
//! Defaults: `num_key_value_heads` the number of query heads, `max_position_embeddings` 2048, `layer_norm_eps` 1e-5,
//! `partial_rotary_factor` 0.5, `hidden_act` tanh-GELU (`gelu_new`), biases everywhere, the head included.

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
    FieldNames { head_dim: None, eps: Some("layer_norm_eps"), ..FieldNames::HUGGING_FACE };

const BIASES: Biases = Biases { gate: false, head: true, ..Biases::ALL };

/// Phi-1 to Phi-2.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "phi",
    config,
    harmless: &["auto_map", "embd_pdrop", "resid_pdrop"],
    tensors: Names {
        own: &[
            TensorName::of(&[Part::FinalNorm], "final_layernorm"),
            TensorName::of(&[Part::Output], "layers.{}.self_attn.dense"),
            TensorName::of(&[Part::Up], "layers.{}.mlp.fc1"),
            TensorName::of(&[Part::Down], "layers.{}.mlp.fc2"),
        ],
        ..Names::HUGGING_FACE
    },
    blocks: Blocks { layer, ..LLAMA.blocks },
    gguf: Some(Gguf { name: "phi2", config: from_gguf, tensors: Names::GGUF, export: None }),
    writable: false,
}];

/// Computes `x + attention(norm(x)) + mlp(norm(x))`, without a gate.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let normed = build.norm(x, Part::AttentionNorm)?;
    let heads = build.heads(normed)?;
    let heads = build.rotate(heads)?;
    let attended = build.attend(heads)?;
    let mlp = build.mlp(normed)?;
    build.parallel_residual(x, attended, mlp)
}

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { eps: 1e-5, activation: Nonlinearity::GeluTanh, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, "phi", &NAMES, &defaults)?;
    (config.norm, config.biases) = (Norm::LAYER, BIASES);
    let defaults = RopeDefaults { partial: Some(0.5), ..RopeDefaults::of(&config) };
    config.rotate_all(rope::read(fields, defaults)?);
    expect(fields, "qk_layernorm", false.into(), "norms of heads are not supported (false)")?;
    config.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let names = &FieldNames::GGUF_LAYER_NORM;
    let mut config = gguf::decoder(keys, "phi", names, Nonlinearity::GeluTanh)?;
    (config.norm, config.biases) = (Norm::LAYER, BIASES);
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Halves, true)?);
    config.checked(names)
}
