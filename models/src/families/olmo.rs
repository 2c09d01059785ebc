//! OLMo 2 and 3.
//!
//! Norms follow attention and MLP instead of preceding them, and queries and keys are normalised over all heads. OLMo 3 has
//! a sliding window in all layers but every fourth; scaling of the rotary embedding applies to the layers without one.
//!
//! Defaults: `num_key_value_heads` the number of query heads, `max_position_embeddings` 2048, `rms_norm_eps` 1e-5; in OLMo 3
//! `sliding_window` 4096 and `rope_theta` 500000. GGUF files of both have the architecture `olmo2`.

use super::{
    architecture::{Architecture, Export, Gguf},
    llama,
};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Result, Rope,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults},
        rope::{
            RopesByKind,
            json::{self as rope, RopeDefaults},
        },
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

/// OLMo 2 and OLMo 3.
pub(super) const ARCHITECTURES: &[Architecture] =
    &[OLMO2, Architecture { name: "olmo3", config: olmo3, ..OLMO2 }];

/// OLMo 2; other families change only what differs.
pub(super) const OLMO2: Architecture = Architecture {
    name: "olmo2",
    config: olmo2,
    harmless: &[],
    tensors: Names {
        own: &[
            TensorName::of(&[Part::AttentionPostNorm], "layers.{}.post_attention_layernorm"),
            TensorName::of(&[Part::MlpPostNorm], "layers.{}.post_feedforward_layernorm"),
        ],
        ..Names::HUGGING_FACE
    },
    blocks: Blocks { layer, ..llama::LLAMA.blocks },
    gguf: Some(Gguf {
        name: "olmo2",
        config: from_gguf,
        tensors: Names::GGUF,
        export: Some(Export { class: "Olmo2ForCausalLM", fields: llama::attention_bias_field }),
    }),
    ..llama::LLAMA
};

/// Computes `x + norm(attention(x))`, then `x + norm(mlp(x))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let heads = build.heads(x)?;
        let heads = build.norm_all_heads(heads)?;
        let heads = build.rotate(heads)?;
        let y = build.attend(heads)?;
        build.norm(y, Part::AttentionPostNorm)
    })?;
    build.residual(x, |build, x| {
        let y = build.gated_mlp(x)?;
        build.norm(y, Part::MlpPostNorm)
    })
}

fn olmo(fields: &Fields<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    let defaults = Defaults { eps: 1e-5, ..Defaults::LLAMA };
    let config = hugging_face::decoder(fields, architecture, &NAMES, &defaults)?;
    let attention = fields.flag("attention_bias")?.unwrap_or(false);
    Ok(DecoderConfig { biases: Biases::of(attention, false), ..config })
}

fn olmo2(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let mut config = olmo(fields, "olmo2")?;
    config.rotate_all(rope::read(fields, RopeDefaults::of(&config))?);
    config.checked(&NAMES)
}

fn olmo3(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let mut config = olmo(fields, "olmo3")?;
    let window = hugging_face::required_sliding_window(fields, 4096)?;
    let sliding = |layer: usize| !(layer + 1).is_multiple_of(4);
    config.set_windows(hugging_face::windows(fields, config.layers, Some(window), sliding)?);
    let defaults = RopeDefaults { theta: 500_000.0, ..RopeDefaults::of(&config) };
    config.rotate_by_kind(RopesByKind::read(fields, None, defaults)?);
    config.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, "olmo2", &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.set_windows(gguf::windows(keys, config.layers, 4)?);
    let full = gguf::rope(keys, &config, RopePairing::Halves, false)?;
    if config.attention.iter().any(|layer| layer.window.is_some()) {
        config.architecture = "olmo3";
    }
    let theta = keys.positive("rope.freq_base_swa")?.map_or(full.theta, f64::from);
    config.rotate_by_kind(RopesByKind { full, sliding: Rope::plain(theta, config.head_dim) });
    config.checked(&FieldNames::GGUF)
}
