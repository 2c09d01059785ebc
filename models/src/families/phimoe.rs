//! Phi-3.5-MoE: Mixtral's layer with layer norms, biases in attention and head, and the router SparseMixer.
//!
//! The router takes the best expert, weighs it by the softmax over those whose logits are near, and does the same once more
//! without it. An expert is near if its distance to the best is at most `2 * router_jitter_noise` of the larger absolute value,
//! also when the model is not trained.
//!
//! Defaults: `num_key_value_heads` 8, `max_position_embeddings` 131072, `rms_norm_eps` (of layer norms, too) 1e-5, `rope_theta`
//! 1000000, `num_local_experts` 16, `num_experts_per_tok` 2, `router_jitter_noise` 0.01, no biases, no sliding window.

use super::{architecture::Architecture, mixtral::MIXTRAL};
use crate::config::{
    Biases, ConfigError, DecoderConfig, FieldNames, Norm, Result,
    fields::Fields,
    hugging_face::{self, Defaults, expect},
    limits,
    mixture::{MixtureNames, SOFTMAX},
    mixture_fields::{self, MixtureDefaults},
    rope::json::{self as rope, RopeDefaults},
};
use dsrun_core::op::{MoeRoute, RouterScore};

const NAMES: FieldNames = FieldNames::HUGGING_FACE;

const ROUTER: MoeRoute = MoeRoute { score: RouterScore::SparseMixer, ..SOFTMAX };

/// Phi-3.5-MoE.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "phimoe",
    config,
    // The noise on inputs is for training.
    harmless: &["auto_map", "input_jitter_noise", "output_router_logits"],
    gguf: None,
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
        _ => fields.positive("router_jitter_noise")?.unwrap_or(0.01),
    };
    mixture.route.threshold = (2.0 * noise) as f32;
    if !mixture.route.threshold.is_finite() {
        return Err(ConfigError::value(fields.path("router_jitter_noise"), noise, "a small number"));
    }
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&NAMES)
}
