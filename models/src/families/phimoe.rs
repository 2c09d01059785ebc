//! Phi-3.5-MoE: Mixtral's layer with layer norms, biases in attention and head, and the router SparseMixer.
//!
//! The router takes the best expert, weighs it by the softmax over those whose logits are near, and does the same once more
//! without it. An expert is near if its distance to the best is at most `2 * router_jitter_noise` of the larger absolute value,
//! also when the model is not trained.
//!
//! Defaults: `num_key_value_heads` 8, `max_position_embeddings` 131072, `rms_norm_eps` (of layer norms, too) 1e-5, `rope_theta`
//! 1000000, `num_local_experts` 16, `num_experts_per_tok` 2, `router_jitter_noise` 0.01, no biases, no sliding window.
//!
//! GGUF files do not hold `router_jitter_noise`, which is the default then. Instead of `long_mscale` and `short_mscale`, llama.cpp's
//! converter writes the attention factor that LongRoPE of these contexts has by default; the published models have another, which
//! replaces it.

use super::{
    architecture::{Architecture, Gguf},
    mixtral::MIXTRAL,
};
use crate::{
    config::{
        Biases, ConfigError, DecoderConfig, FieldNames, Norm, Result, Rope, RopeScaling,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults, expect},
        limits,
        mixture::{MixtureNames, SOFTMAX},
        mixture_fields::{self, MixtureDefaults},
        rope::{
            json::{self as rope, RopeDefaults},
            long_attention_factor,
        },
    },
    tensor_names::Names,
};
use dsrun_core::op::{MoeRoute, Nonlinearity, RopePairing, RouterScore};

const NAMES: FieldNames = FieldNames::HUGGING_FACE;

/// The noise of the router, where files do not give it.
const NOISE: f64 = 0.01;

/// The factor of LongRoPE in the published models.
const LONG_FACTOR: f32 = 1.243_163_1;

const ROUTER: MoeRoute = MoeRoute { score: RouterScore::SparseMixer, ..SOFTMAX };

/// Phi-3.5-MoE.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "phimoe",
    config,
    // The noise on inputs is for training.
    harmless: &["auto_map", "input_jitter_noise", "output_router_logits"],
    gguf: Some(Gguf { name: "phimoe", config: from_gguf, tensors: Names::GGUF, export: None }),
    ..MIXTRAL
}];

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { kv_heads: Some(8), context: 131_072, eps: 1e-5, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, "phimoe", &NAMES, &defaults)?;
    config.norm = Norm::LAYER;
    let head = fields.flag("lm_head_bias")?.unwrap_or(false);
    config.biases = Biases { head, ..Biases::of(fields.flag("attention_bias")?.unwrap_or(false), false) };
    let original_context = fields.size("original_max_position_embeddings", 1, limits::CONTEXT)?;
    let defaults =
        RopeDefaults { theta: 1_000_000.0, original_context, more: rope::GAINS, ..RopeDefaults::of(&config) };
    config.rotate_all(rope::read(fields, defaults)?);
    config.set_windows(vec![hugging_face::sliding_window(fields, None)?; config.layers]);
    let defaults =
        MixtureDefaults { experts: Some(16), top_k: Some(2), intermediate: Some(config.intermediate) };
    let mut mixture = mixture_fields::read(fields, &MixtureNames::MIXTRAL, defaults, ROUTER, config.layers)?;
    expect(fields, "num_experts_per_tok", 2.into(), "the router of Phi-3.5-MoE chooses 2 experts")?;
    let noise = match fields.value("router_jitter_noise").and_then(|value| value.as_f64()) {
        Some(0.0) => 0.0,
        _ => fields.positive("router_jitter_noise")?.unwrap_or(NOISE),
    };
    mixture.route.threshold = (2.0 * noise) as f32;
    if !mixture.route.threshold.is_finite() {
        return Err(ConfigError::value(fields.path("router_jitter_noise"), noise, "a small number"));
    }
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let names = &FieldNames::GGUF;
    let mut config = gguf::decoder(keys, "phimoe", names, Nonlinearity::Silu)?;
    config.norm = Norm::LAYER;
    let mut rope = gguf::rope(keys, &config, RopePairing::Halves, false)?;
    if has_default_factor(&rope, config.context) {
        rope.scale = LONG_FACTOR;
    }
    config.rotate_all(rope);
    config.set_windows(vec![gguf::sliding_window(keys)?; config.layers]);
    let mut mixture = mixture_fields::from_gguf(keys, Some(config.intermediate), ROUTER, config.layers)?;
    if mixture.route.top_k != 2 {
        let reason = "the router of Phi-3.5-MoE chooses 2 experts";
        return Err(ConfigError::unsupported(keys.path(names.mixture.top_k), mixture.route.top_k, reason));
    }
    mixture.route.threshold = (2.0 * NOISE) as f32;
    DecoderConfig { mixture: Some(mixture), ..config }.checked(names)
}

/// Whether the factor of LongRoPE is that which follows from the contexts.
fn has_default_factor(rope: &Rope, context: usize) -> bool {
    let RopeScaling::Long { original_context, .. } = rope.scaling else { return false };
    let factor = long_attention_factor(context as f64 / original_context as f64, original_context) as f32;
    (rope.scale / factor - 1.0).abs() < 1e-5
}
