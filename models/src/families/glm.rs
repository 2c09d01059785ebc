//! GLM-4.5: Qwen 3's attention with partial rotation, and DeepSeek's router.
//!
//! The router computes sigmoids. A learned bias (`e_score_correction_bias`) is added to them to choose experts, not to weigh
//! them: the experts are those of the `topk_group` groups with the largest sum of the two best. Weights are divided by their
//! sum, if `norm_topk_prob` says so, and multiplied by `routed_scaling_factor`. The first layers have an MLP, and all others
//! a shared expert without a gate.
//!
//! Defaults: `num_key_value_heads` 8, `max_position_embeddings` 131072, `rms_norm_eps` 1e-5, `partial_rotary_factor` 0.5,
//! `n_routed_experts` 128, `num_experts_per_tok` 8, `moe_intermediate_size` 1408, `n_shared_experts` 1, `first_k_dense_replace` 1,
//! `n_group` and `topk_group` 1, no norms of heads.
//!
//! The layers that predict further tokens, behind the others, are left alone; GGUF files count them among the layers.

use super::{
    architecture::{Architecture, Gguf},
    mixtral::MIXTRAL,
};
use crate::{
    config::{
        Biases, ConfigError, DecoderConfig, FieldNames, Result,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults},
        limits,
        mixture::{DEEPSEEK_SIGMOID, MixtureNames},
        mixture_fields::{self, MixtureDefaults},
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

const NAMES: FieldNames = FieldNames { mixture: MixtureNames::DEEPSEEK, ..FieldNames::HUGGING_FACE };

/// GLM-4.5.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "glm4_moe",
    config,
    harmless: &["num_mtp_layers", "output_router_logits", "router_jitter_noise"],
    tensors: Names {
        own: &[
            TensorName::of(&[Part::SelectionBias], "layers.{}.mlp.gate")
                .with_suffixes([".e_score_correction_bias", ""]),
            TensorName::of(&[Part::SharedGate], "layers.{}.mlp.shared_experts.gate_proj"),
            TensorName::of(&[Part::SharedUp], "layers.{}.mlp.shared_experts.up_proj"),
            TensorName::of(&[Part::SharedDown], "layers.{}.mlp.shared_experts.down_proj"),
        ],
        ..Names::HUGGING_FACE
    },
    blocks: Blocks { layer, ..MIXTRAL.blocks },
    gguf: Some(Gguf {
        name: "glm4moe",
        config: from_gguf,
        tensors: Names {
            own: &[TensorName::of(&[Part::MlpNorm], "blk.{}.post_attention_norm")],
            ..Names::GGUF
        },
        export: None,
    }),
    ..MIXTRAL
}];

/// Computes `x + attention(norm(x))`, then `x + experts(norm(x))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let x = build.norm(x, Part::AttentionNorm)?;
        let mut heads = build.heads(x)?;
        if build.config.head_norms {
            heads = build.norm_heads(heads)?;
        }
        let heads = build.rotate(heads)?;
        build.attend(heads)
    })?;
    build.residual(x, |build, x| {
        let x = build.norm(x, Part::MlpNorm)?;
        build.experts_or_mlp(x)
    })
}

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { kv_heads: Some(8), context: 131_072, eps: 1e-5, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, "glm4_moe", &NAMES, &defaults)?;
    let biases = Biases::of(fields.flag("attention_bias")?.unwrap_or(false), false);
    config.biases = Biases { output: false, ..biases };
    config.unread_layers = fields.size("num_nextn_predict_layers", 0, limits::LAYERS)?.unwrap_or(0);
    config.head_norms = fields.flag("use_qk_norm")?.unwrap_or(false);
    let defaults = RopeDefaults { partial: Some(0.5), ..RopeDefaults::of(&config) };
    config.rotate_all(rope::read(fields, defaults)?);

    let defaults = MixtureDefaults { experts: Some(128), top_k: Some(8), intermediate: Some(1408) };
    let mut mixture =
        mixture_fields::read(fields, &NAMES.mixture, defaults, DEEPSEEK_SIGMOID, config.layers)?;
    mixture.renormalise(fields.flag("norm_topk_prob")?.unwrap_or(true));
    mixture.route.groups = mixture_fields::count(fields, NAMES.mixture.groups, 1)?;
    mixture.route.top_groups = mixture_fields::count(fields, NAMES.mixture.top_groups, 1)?;
    mixture.selection_bias = true;
    mixture_fields::read_shared(fields, &mut mixture, [1, 1], 1.0)?;
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&NAMES)
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    const UNREAD: &str = "nextn_predict_layers";
    let mut config = gguf::decoder(keys, "glm4_moe", &FieldNames::GGUF, Nonlinearity::Silu)?;
    let unread = keys.get::<u32>(UNREAD)?.unwrap_or(0) as usize;
    if unread >= config.layers {
        let expected = format!("below {} ({})", config.layers, keys.path(FieldNames::GGUF.layers));
        return Err(ConfigError::value(keys.path(UNREAD), unread, expected));
    }
    (config.layers, config.unread_layers) = (config.layers - unread, unread);
    config.attention.truncate(config.layers);
    config.head_norms = keys.has("blk.0.attn_q_norm.weight");
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Halves, true)?);
    let mixture = mixture_fields::deepseek_from_gguf(keys, config.layers)?;
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&FieldNames::GGUF)
}
