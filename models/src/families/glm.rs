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
//! The layers that predict further tokens, behind the others, are left alone.

use super::{architecture::Architecture, mixtral::MIXTRAL};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Result, SharedExpert,
        fields::Fields,
        hugging_face::{self, Defaults},
        limits,
        mixture::{MixtureNames, SOFTMAX},
        mixture_fields::{self, MixtureDefaults},
        rope::json::{self as rope, RopeDefaults},
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::{
    Result as CoreResult,
    op::{GroupScore, MoeRoute, RouterScore},
    program::ValueId,
};

const NAMES: FieldNames = FieldNames { mixture: MixtureNames::DEEPSEEK, ..FieldNames::HUGGING_FACE };

const ROUTER: MoeRoute =
    MoeRoute { score: RouterScore::Sigmoid, group_score: GroupScore::TopTwoSum, eps: 1e-20, ..SOFTMAX };

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
    gguf: None,
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
    let mut mixture = mixture_fields::read(fields, &NAMES.mixture, defaults, ROUTER, config.layers)?;
    mixture.renormalise(fields.flag("norm_topk_prob")?.unwrap_or(true));
    let count = |field: &str, default: u32| -> Result<u32> {
        let size = fields.size(field, 1, limits::INTERMEDIATE)?;
        Ok(size.and_then(|size| u32::try_from(size).ok()).unwrap_or(default))
    };
    mixture.route.groups = count(NAMES.mixture.groups, 1)?;
    mixture.route.top_groups = count(NAMES.mixture.top_groups, 1)?;
    mixture.route.scale = fields.positive("routed_scaling_factor")?.unwrap_or(1.0) as f32;
    mixture.selection_bias = true;
    let shared = count("n_shared_experts", 1)? as usize * mixture.intermediate;
    mixture.shared = Some(SharedExpert { intermediate: shared, gated: false });
    let dense = fields.size("first_k_dense_replace", 0, limits::LAYERS)?.unwrap_or(1);
    for (layer, sparse) in mixture.layers.iter_mut().enumerate() {
        *sparse = layer >= dense;
    }
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&NAMES)
}
