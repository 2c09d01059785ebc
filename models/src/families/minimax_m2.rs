//! MiniMax-M2: OLMoE's attention with a part of each head rotated, Mixtral's names, and sigmoids in the router.
//!
//! A learned bias (`e_score_correction_bias`) is added to the sigmoids to choose experts, not to weigh them; the weights of the chosen ones are
//! divided by their sum. `rotary_dim` is the part of a head that is rotated, where `partial_rotary_factor` does not say it.
//!
//! Defaults: `head_dim` 128, `num_key_value_heads` 8, `max_position_embeddings` 196608, `rms_norm_eps` 1e-6, `rope_theta` 5000000,
//! `num_local_experts` 256, `num_experts_per_tok` 8. `intermediate_size` is that of an expert.

use super::{
    architecture::{Architecture, Gguf},
    mixtral::MIXTRAL,
    olmoe,
};
use crate::{
    config::{
        ConfigError, DecoderConfig, FieldNames, Result,
        fields::{Fields, shortened},
        gguf::{self, Keys},
        hugging_face::{self, Defaults, expect, expect_one},
        limits,
        mixture::{Mixture, MixtureNames, SOFTMAX},
        mixture_fields::{self, MixtureDefaults},
        rope::json::{self as rope, RopeDefaults},
    },
    layers::Blocks,
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::op::{MoeRoute, Nonlinearity, RopePairing, RouterNorm, RouterScore};
use serde_json::Value;

const NAMES: FieldNames = FieldNames { mixture: MixtureNames::MIXTRAL, ..FieldNames::HUGGING_FACE };

const ROUTER: MoeRoute = MoeRoute { score: RouterScore::Sigmoid, norm: RouterNorm::Sum, ..SOFTMAX };

/// MiniMax-M2.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "minimax_m2",
    config,
    // What predicts further tokens is left alone. Layers of dense MLPs and shared experts, whose size is 0, are those of MiniMax-M1.
    harmless: &[
        "mlp_intermediate_size",
        "shared_moe_mode",
        "output_router_logits",
        "router_jitter_noise",
        "use_mtp",
        "num_mtp_modules",
        "mtp_transformer_layers",
    ],
    tensors: Names {
        own: &[
            TensorName::of(&[Part::Router], "layers.{}.block_sparse_moe.gate"),
            TensorName::of(&[Part::SelectionBias], "layers.{}.block_sparse_moe")
                .with_suffixes([".e_score_correction_bias", ""]),
            TensorName::of(&[Part::ExpertGate], "layers.{}.block_sparse_moe.experts.{}.w1"),
            TensorName::of(&[Part::ExpertUp], "layers.{}.block_sparse_moe.experts.{}.w3"),
            TensorName::of(&[Part::ExpertDown], "layers.{}.block_sparse_moe.experts.{}.w2"),
        ],
        ..Names::HUGGING_FACE
    },
    blocks: Blocks { layer: olmoe::layer, ..MIXTRAL.blocks },
    gguf: Some(Gguf { name: "minimax-m2", config: from_gguf, tensors: Names::GGUF, export: None }),
    ..MIXTRAL
}];

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { head_dim: Some(128), kv_heads: Some(8), context: 196_608, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, "minimax_m2", &NAMES, &defaults)?;
    let rotated = fields.size("rotary_dim", 1, limits::HEAD_DIM)?;
    let part = rotated.map_or(1.0, |rotated| rotated as f64 / config.head_dim as f64);
    if part > 1.0 {
        let expected = format!("at most {} (the head size)", config.head_dim);
        return Err(ConfigError::value(fields.path("rotary_dim"), rotated.unwrap_or(0), expected));
    }
    let defaults = RopeDefaults { theta: 5_000_000.0, partial: Some(part), ..RopeDefaults::of(&config) };
    config.rotate_all(rope::read(fields, defaults)?);
    const ONLY: &str = "the published models have no other";
    for (field, value) in [
        ("use_qk_norm", Value::Bool(true)),
        ("qk_norm_type", "per_layer".into()),
        ("scoring_func", "sigmoid".into()),
        ("use_routing_bias", Value::Bool(true)),
        ("shared_intermediate_size", 0.into()),
        ("sliding_window", Value::Null),
    ] {
        expect(fields, field, value, ONLY)?;
    }
    // Factors of the residuals of MiniMax-M1.
    for layer in ["linear_attention", "full_attention", "mlp"] {
        for factor in ["alpha", "beta"] {
            expect_one(fields, &format!("layernorm_{layer}_{factor}"))?;
        }
    }
    if let Some(kinds) = fields.value("attn_type_list")
        && kinds.as_array().is_none_or(|kinds| kinds.iter().any(|kind| kind.as_u64() != Some(1)))
    {
        let reason = "every layer must have full attention (1)";
        return Err(ConfigError::unsupported(fields.path("attn_type_list"), shortened(kinds), reason));
    }
    let defaults =
        MixtureDefaults { experts: Some(256), top_k: Some(8), intermediate: Some(config.intermediate) };
    let mixture = mixture_fields::read(fields, &NAMES.mixture, defaults, ROUTER, config.layers)?;
    let mixture = Mixture { selection_bias: true, ..mixture };
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    const SCORES: &str = "expert_gating_func";
    let mut config = gguf::decoder(keys, "minimax_m2", &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Halves, true)?);
    gguf::no_window(keys, config.context)?;
    if let Some(other) = keys.get::<u32>(SCORES)?.filter(|scores| *scores != 2) {
        return Err(ConfigError::unsupported(keys.path(SCORES), other, "supported: 2 (sigmoid)"));
    }
    let mixture = mixture_fields::from_gguf(keys, Some(config.intermediate), ROUTER, config.layers)?;
    let mixture = Mixture { selection_bias: true, ..mixture };
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&FieldNames::GGUF)
}
