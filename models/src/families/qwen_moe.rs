//! Qwen 1.5 and 2 with experts, and Qwen 3 with experts.
//!
//! The router computes the softmax over all experts; `norm_topk_prob` says whether the weights of the chosen ones are divided
//! by their sum. Layers in `mlp_only_layers`, and those that `decoder_sparse_step` skips, have an MLP. Qwen 2 has biases on
//! queries, keys and values, and a shared expert with a gate; Qwen 3 normalises query and key heads.
//!
//! | default of | qwen2_moe | qwen3_moe |
//! |---|---|---|
//! | `num_key_value_heads` | 16 | 4 |
//! | `num_experts`, `num_experts_per_tok` | 60, 4 | 128, 8 |
//! | `moe_intermediate_size` | 1408 | 768 |
//! | `shared_expert_intermediate_size` | 5632 | none |
//!
//! GGUF files do not say whether weights are divided by their sum: those of Qwen 3 are, those of Qwen 2 are not, as in
//! llama.cpp.

use super::{
    architecture::{Architecture, Gguf},
    mixtral::MIXTRAL,
    qwen::normed_heads_layer,
};
use crate::{
    config::{
        Biases, ConfigError, DecoderConfig, FieldNames, Result, SharedExpert,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults, expect},
        limits,
        mixture::{MixtureNames, SOFTMAX},
        mixture_fields::{self, MixtureDefaults},
        rope::json as rope,
    },
    layers::Blocks,
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::op::{Nonlinearity, RopePairing};

const NAMES: FieldNames = FieldNames { mixture: MixtureNames::QWEN, ..FieldNames::HUGGING_FACE };

/// Qwen 2 and Qwen 3 with experts.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "qwen2_moe",
        config: qwen2,
        tensors: Names {
            own: &[
                TensorName::of(&[Part::SharedRouter], "layers.{}.mlp.shared_expert_gate"),
                TensorName::of(&[Part::SharedGate], "layers.{}.mlp.shared_expert.gate_proj"),
                TensorName::of(&[Part::SharedUp], "layers.{}.mlp.shared_expert.up_proj"),
                TensorName::of(&[Part::SharedDown], "layers.{}.mlp.shared_expert.down_proj"),
            ],
            ..Names::HUGGING_FACE
        },
        gguf: Some(Gguf { name: "qwen2moe", config: qwen2_gguf, tensors: Names::GGUF, export: None }),
        ..MIXTRAL
    },
    Architecture {
        name: "qwen3_moe",
        config: qwen3,
        harmless: &["max_window_layers", "mlp_bias", "output_router_logits", "router_jitter_noise"],
        tensors: Names::HUGGING_FACE,
        blocks: Blocks { layer: normed_heads_layer, ..MIXTRAL.blocks },
        gguf: Some(Gguf { name: "qwen3moe", config: qwen3_gguf, tensors: Names::GGUF, export: None }),
        ..MIXTRAL
    },
];

/// Reads everything but windows and biases.
fn qwen(
    fields: &Fields<'_>,
    architecture: &'static str,
    kv_heads: usize,
    experts: MixtureDefaults,
) -> Result<DecoderConfig> {
    let defaults = Defaults { kv_heads: Some(kv_heads), context: 32_768, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, architecture, &NAMES, &defaults)?;
    config.rotate_all(rope::read(fields, rope::RopeDefaults::of(&config))?);
    let mut mixture = mixture_fields::read(fields, &NAMES.mixture, experts, SOFTMAX, config.layers)?;
    mixture.renormalise(fields.flag("norm_topk_prob")?.unwrap_or(false));
    let step = fields.size("decoder_sparse_step", 1, limits::LAYERS)?.unwrap_or(1);
    let dense = fields.indices("mlp_only_layers", config.layers)?.unwrap_or_default();
    for (layer, sparse) in mixture.layers.iter_mut().enumerate() {
        *sparse = (layer + 1).is_multiple_of(step) && !dense.contains(&layer);
    }
    Ok(DecoderConfig { mixture: Some(mixture), ..config })
}

fn qwen2(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = MixtureDefaults { experts: Some(60), top_k: Some(4), intermediate: Some(1408) };
    let mut config = qwen(fields, "qwen2_moe", 16, defaults)?;
    let shared = fields.size(NAMES.mixture.shared, 1, limits::INTERMEDIATE)?.unwrap_or(5632);
    if let Some(mixture) = &mut config.mixture {
        mixture.shared = Some(SharedExpert { intermediate: shared, gated: true });
    }
    let biases = Biases::of(fields.flag("qkv_bias")?.unwrap_or(true), false);
    config.biases = Biases { output: false, ..biases };
    let switched_on = fields.flag("use_sliding_window")?.unwrap_or(false);
    let window = hugging_face::sliding_window(fields, Some(4096))?.filter(|_| switched_on);
    let end = fields.size("max_window_layers", 0, usize::MAX)?.unwrap_or(28);
    // As in transformers: every second layer of the first ones.
    let sliding = |layer: usize| layer.is_multiple_of(2) && layer < end;
    config.set_windows(hugging_face::windows(fields, config.layers, window, sliding)?);
    config.checked(&NAMES)
}

fn qwen3(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = MixtureDefaults { experts: Some(128), top_k: Some(8), intermediate: Some(768) };
    let mut config = qwen(fields, "qwen3_moe", 4, defaults)?;
    // Fields of other members of the family, which files of Qwen3-Coder have.
    expect(fields, NAMES.mixture.shared, 0.into(), "there is no shared expert (0)")?;
    expect(fields, "use_qk_norm", true.into(), "heads have norms (true)")?;
    config.biases = Biases::of(fields.flag("attention_bias")?.unwrap_or(false), false);
    let switched_on = fields.flag("use_sliding_window")?.unwrap_or(false);
    let window = hugging_face::sliding_window(fields, Some(4096))?.filter(|_| switched_on);
    config.set_windows(vec![window; config.layers]);
    config.checked(&NAMES)
}

fn qwen_gguf(keys: &Keys<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, architecture, &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Halves, false)?);
    gguf::no_window(keys, config.context)?;
    let mixture = mixture_fields::from_gguf(keys, None, SOFTMAX, config.layers)?;
    Ok(DecoderConfig { mixture: Some(mixture), ..config })
}

fn qwen2_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = qwen_gguf(keys, "qwen2_moe")?;
    let field = FieldNames::GGUF.mixture.shared;
    let shared = keys.size(field, limits::INTERMEDIATE)?;
    let intermediate = shared.ok_or_else(|| ConfigError::Missing { field: keys.path(field) })?;
    if let Some(mixture) = &mut config.mixture {
        mixture.shared = Some(SharedExpert { intermediate, gated: true });
    }
    config.checked(&FieldNames::GGUF)
}

fn qwen3_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = qwen_gguf(keys, "qwen3_moe")?;
    if let Some(mixture) = &mut config.mixture {
        mixture.renormalise(true);
    }
    config.checked(&FieldNames::GGUF)
}
