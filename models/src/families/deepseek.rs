//! DeepSeek-V2, V3 and R1, and Kimi-K2: latent attention, groups of experts, and shared experts without a gate.
//!
//! The first `first_k_dense_replace` layers have an MLP. V2 chooses experts by their softmax: from all of them (`topk_method`
//! `greedy`), or from the `topk_group` groups whose best expert is best (`group_limited_greedy`). V3 computes sigmoids, adds a
//! learned bias to choose experts but not to weigh them, ranks groups by the sum of their two best, and divides weights by
//! their sum if `norm_topk_prob` says so. Weights are multiplied by `routed_scaling_factor`.
//!
//! Attention scores are multiplied by the square of YaRN's gain `mscale_all_dim`. The norms of latents have an eps of 1e-6.
//!
//! | default of | deepseek_v2 | deepseek_v3, kimi_k2 |
//! |---|---|---|
//! | `max_position_embeddings` | 2048 | 4096 |
//! | `q_lora_rank`, `kv_lora_rank` | 1536, 512 | the same |
//! | `qk_nope_head_dim`, `qk_rope_head_dim`, `v_head_dim` | 128, 64, 128 | the same |
//! | `n_routed_experts`, `num_experts_per_tok` | 64, required | 256, 8 |
//! | `moe_intermediate_size`, `n_shared_experts` | 1407, 2 | 2048, 1 |
//! | `n_group`, `topk_group` | 1, 1 | 8, 4 |
//! | `routed_scaling_factor`, `norm_topk_prob` | 1, false | 2.5, true |
//! | `first_k_dense_replace` | 0 | 3 |
//!
//! The layers that predict further tokens, behind the others, are left alone.

use super::{architecture::Architecture, deepseek_gguf, mixtral::MIXTRAL};
use crate::{
    config::{
        Biases, ConfigError, DecoderConfig, FieldNames, Mixture, Result,
        fields::{Fields, shortened},
        hugging_face::{self, Defaults, expect},
        latent::LatentNames,
        latent_fields, limits,
        mixture::{DEEPSEEK_SIGMOID, MixtureNames, SOFTMAX},
        mixture_fields::{self, MixtureDefaults, count},
        rope::json::{self as rope, RopeDefaults},
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::{Result as CoreResult, op::MoeRoute, program::ValueId};

const NAMES: FieldNames = FieldNames {
    head_dim: Some(LatentNames::HUGGING_FACE.rotated),
    mixture: MixtureNames::DEEPSEEK,
    ..FieldNames::HUGGING_FACE
};

/// DeepSeek-V2, DeepSeek-V3 and Kimi-K2. What GGUF files hold depends on their metadata alone.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture { name: "deepseek_v2", config: v2, ..DEEPSEEK },
    DEEPSEEK,
    Architecture { name: "kimi_k2", config: |fields| v3(fields, "kimi_k2"), ..DEEPSEEK },
];

const DEEPSEEK: Architecture = Architecture {
    name: "deepseek_v3",
    config: |fields| v3(fields, "deepseek_v3"),
    harmless: &["auto_map", "aux_loss_alpha", "ep_size", "num_mtp_layers", "output_router_logits", "seq_aux"],
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
    gguf: Some(deepseek_gguf::GGUF),
    writable: false,
};

/// Computes `x + attention(norm(x))`, then `x + experts(norm(x))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let x = build.residual(x, |build, x| {
        let x = build.norm(x, Part::AttentionNorm)?;
        build.latent_attention(x)
    })?;
    build.residual(x, |build, x| {
        let x = build.norm(x, Part::MlpNorm)?;
        build.experts_or_mlp(x)
    })
}

fn v2(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let experts = MixtureDefaults { experts: Some(64), top_k: None, intermediate: Some(1407) };
    let (config, mut mixture) = deepseek(fields, "deepseek_v2", 2048, experts, SOFTMAX)?;
    mixture_fields::read_shared(fields, &mut mixture, [2, 0], 1.0)?;
    expect(fields, "scoring_func", "softmax".into(), "DeepSeek-V2 chooses experts by their softmax")?;
    expect(fields, "norm_topk_prob", false.into(), "DeepSeek-V2 does not divide weights by their sum")?;
    let groups = count(fields, NAMES.mixture.groups, 1)?;
    let top_groups = count(fields, NAMES.mixture.top_groups, 1)?;
    match fields.text("topk_method")?.unwrap_or("greedy") {
        "greedy" => {}
        "group_limited_greedy" => (mixture.route.groups, mixture.route.top_groups) = (groups, top_groups),
        other => {
            let reason = "supported: greedy, group_limited_greedy";
            let other = shortened(&other.into());
            return Err(ConfigError::unsupported(fields.path("topk_method"), other, reason));
        }
    }
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&NAMES)
}

fn v3(fields: &Fields<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    let experts = MixtureDefaults { experts: Some(256), top_k: Some(8), intermediate: Some(2048) };
    let (mut config, mut mixture) = deepseek(fields, architecture, 4096, experts, DEEPSEEK_SIGMOID)?;
    mixture_fields::read_shared(fields, &mut mixture, [1, 3], 2.5)?;
    expect(fields, "scoring_func", "sigmoid".into(), "the scores of experts must be sigmoids")?;
    expect(fields, "topk_method", "noaux_tc".into(), "experts must be chosen with a bias")?;
    expect(fields, "rope_interleave", true.into(), "neighbours must be rotated together")?;
    config.unread_layers = fields.size("num_nextn_predict_layers", 0, limits::LAYERS)?.unwrap_or(0);
    mixture.renormalise(fields.flag("norm_topk_prob")?.unwrap_or(true));
    mixture.route.groups = count(fields, NAMES.mixture.groups, 8)?;
    mixture.route.top_groups = count(fields, NAMES.mixture.top_groups, 4)?;
    mixture.selection_bias = true;
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&NAMES)
}

/// Reads everything but the choice of experts and the shared ones.
fn deepseek(
    fields: &Fields<'_>,
    architecture: &'static str,
    context: usize,
    experts: MixtureDefaults,
    route: MoeRoute,
) -> Result<(DecoderConfig, Mixture)> {
    let latent = latent_fields::read(fields)?;
    let defaults = Defaults { head_dim: Some(latent.rotated), context, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, architecture, &NAMES, &defaults)?;
    let heads = config.heads;
    expect(fields, NAMES.kv_heads, heads.into(), "every head has its own keys (num_attention_heads)")?;
    expect(fields, "head_dim", latent.rotated.into(), "it must be qk_rope_head_dim")?;
    expect(
        fields,
        "qk_head_dim",
        (latent.plain + latent.rotated).into(),
        "it must be the sum of both parts",
    )?;
    expect(fields, "moe_layer_freq", 1.into(), "every layer behind the first must have experts")?;
    expect(fields, "mlp_bias", false.into(), "MLPs with biases are not supported")?;
    let bias = fields.flag("attention_bias")?.unwrap_or(false);
    config.biases = Biases { key: bias, output: bias, ..Biases::default() };
    let rope = rope::read(fields, RopeDefaults { more: rope::GAINS, ..RopeDefaults::of(&config) })?;
    config.attend_to_latents(latent, rope, rope::score_factor(fields)?);
    let mixture = mixture_fields::read(fields, &NAMES.mixture, experts, route, config.layers)?;
    Ok((config, mixture))
}
