//! gpt-oss: attention with sinks, and experts with biases and a bounded activation.
//!
//! Every second layer, from the first on, has a sliding window, or those that `layer_types` lists; each head has a learned
//! score without a key (sink). The router has a bias; weights are the softmax over the chosen experts. An expert computes
//! `down(f(min(gate, 7)) * (clamp(up, -7, 7) + 1))` with `f(x) = x / (1 + exp(-1.702 x))`.
//!
//! Published files store experts as MXFP4, `[experts, outputs, inputs]`, others as floats, `[experts, inputs, outputs]`; in both,
//! outputs of gate and up take turns.
//!
//! Defaults: `head_dim` 64, `num_key_value_heads` 8, `max_position_embeddings` 131072, `rms_norm_eps` 1e-5, `sliding_window` 128,
//! `rope_theta` 150000 with YaRN by 32 from 4096, whose ramp is not rounded to whole pairs, `num_local_experts` 128,
//! `num_experts_per_tok` 4, `swiglu_limit` 7.

use super::{
    architecture::{Architecture, Gguf},
    mixtral::MIXTRAL,
};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Mixture, Result,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults, expect},
        mixture::{MixtureNames, SOFTMAX},
        mixture_fields::{self, MixtureDefaults},
        rope::{
            RopeScaling,
            json::{self as rope, RopeDefaults},
        },
    },
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::op::{MoeRoute, Nonlinearity, RopePairing, RouterScore};

const NAMES: FieldNames = FieldNames::HUGGING_FACE;

const ROUTER: MoeRoute = MoeRoute { score: RouterScore::SoftmaxOfSelected, ..SOFTMAX };

const GATE_AND_UP: &[Part] = &[Part::ExpertGate, Part::ExpertUp];
const SUFFIXES: [&str; 2] = ["", "_bias"];
const SINKS: TensorName = TensorName::of(&[Part::Sinks], "layers.{}.self_attn.sinks").with_suffixes(["", ""]);
const ROUTER_NAME: TensorName = TensorName::of(&[Part::Router], "layers.{}.mlp.router");

/// The names of files whose experts are MXFP4.
static MXFP4_NAMES: Names = Names {
    own: &[
        SINKS,
        ROUTER_NAME,
        TensorName::of(GATE_AND_UP, "layers.{}.mlp.experts.gate_up_proj")
            .with_suffixes([".mxfp4", "_bias"])
            .interleaved(),
        TensorName::of(&[Part::ExpertDown], "layers.{}.mlp.experts.down_proj")
            .with_suffixes([".mxfp4", "_bias"]),
    ],
    ..Names::HUGGING_FACE
};

/// gpt-oss.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "gpt_oss",
    config,
    harmless: HARMLESS,
    tensors: Names {
        own: &[
            SINKS,
            ROUTER_NAME,
            TensorName::of(GATE_AND_UP, "layers.{}.mlp.experts.gate_up_proj")
                .with_suffixes(SUFFIXES)
                .interleaved()
                .transposed(),
            TensorName::of(&[Part::ExpertDown], "layers.{}.mlp.experts.down_proj")
                .with_suffixes(SUFFIXES)
                .transposed(),
        ],
        other: Some((Part::ExpertDown, &MXFP4_NAMES)),
        ..Names::HUGGING_FACE
    },
    gguf: Some(Gguf {
        name: "gpt-oss",
        config: from_gguf,
        tensors: Names {
            own: &[TensorName::of(&[Part::MlpNorm], "blk.{}.post_attention_norm")],
            ..Names::GGUF
        },
        export: None,
    }),
    ..MIXTRAL
}];

/// Fields that no version of transformers reads.
const HARMLESS: &[&str] =
    &["experts_per_token", "initial_context_length", "output_router_logits", "router_jitter_noise"];

fn with_bounds(mixture: Mixture, limit: f32) -> Mixture {
    Mixture { router_bias: true, biases: true, limit, up_offset: 1.0, ..mixture }
}

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        kv_heads: Some(8),
        head_dim: Some(64),
        context: 131_072,
        eps: 1e-5,
        activation: Nonlinearity::QuickGelu,
        ..Defaults::LLAMA
    };
    expect(fields, "hidden_act", "silu".into(), "the activation must be that of gpt-oss (silu)")?;
    expect(fields, "swiglu_alpha", 1.702.into(), "the gain of the activation must be 1.702")?;
    let mut config = hugging_face::decoder(fields, "gpt_oss", &NAMES, &defaults)?;
    config.activation = Nonlinearity::QuickGelu;
    config.biases = Biases::of(fields.flag("attention_bias")?.unwrap_or(true), false);
    config.sinks = true;
    let window = hugging_face::required_sliding_window(fields, 128)?;
    let windows =
        hugging_face::windows(fields, config.layers, Some(window), |layer| layer.is_multiple_of(2))?;
    config.set_windows(windows);
    let defaults = RopeDefaults {
        theta: 150_000.0,
        scaling: Some(RopeScaling::Yarn {
            factor: 32.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: false,
            original_context: 4096,
        }),
        ..RopeDefaults::of(&config)
    };
    config.rotate_all(rope::read(fields, defaults)?);
    let defaults =
        MixtureDefaults { experts: Some(128), top_k: Some(4), intermediate: Some(config.intermediate) };
    let mixture = mixture_fields::read(fields, &MixtureNames::MIXTRAL, defaults, ROUTER, config.layers)?;
    let limit = fields.positive("swiglu_limit")?.unwrap_or(7.0) as f32;
    DecoderConfig { mixture: Some(with_bounds(mixture, limit)), ..config }.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, "gpt_oss", &FieldNames::GGUF, Nonlinearity::QuickGelu)?;
    config.sinks = true;
    config.set_windows(gguf::windows(keys, config.layers, 2)?);
    let mut rope = gguf::rope(keys, &config, RopePairing::Halves, false)?;
    if let RopeScaling::Yarn { truncate, .. } = &mut rope.scaling {
        *truncate = false;
    }
    config.rotate_all(rope);
    let mixture = mixture_fields::from_gguf(keys, Some(config.intermediate), ROUTER, config.layers)?;
    DecoderConfig { mixture: Some(with_bounds(mixture, 7.0)), ..config }.checked(&FieldNames::GGUF)
}
