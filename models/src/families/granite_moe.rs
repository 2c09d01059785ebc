//! Granite with experts: Mixtral's layer with factors on embeddings, attention scores, residual branches and logits.
//!
//! The router chooses by logits; weights are the softmax over the chosen experts. Files store the experts of a layer as one
//! tensor, gate before up. `granitemoeshared` has a shared expert without a gate.
//!
//! Defaults: `num_key_value_heads` the number of query heads, `embedding_multiplier`, `attention_multiplier`,
//! `residual_multiplier` and `logits_scaling` 1, `num_local_experts` 8, `num_experts_per_tok` 2.

use super::{
    architecture::{Architecture, Gguf},
    llama,
    mixtral::{self, MIXTRAL},
};
use crate::{
    config::{
        Biases, ConfigError, DecoderConfig, FieldNames, Result, SharedExpert,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults},
        limits,
        mixture::{MixtureNames, SOFTMAX},
        mixture_fields::{self, MixtureDefaults},
        rope::json::{self as rope, RopeDefaults},
    },
    layers::Blocks,
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::op::{MoeRoute, Nonlinearity, RopePairing, RouterScore};

const NAMES: FieldNames = FieldNames {
    mixture: MixtureNames { shared: "shared_intermediate_size", ..MixtureNames::MIXTRAL },
    ..FieldNames::HUGGING_FACE
};

const ROUTER: MoeRoute = MoeRoute { score: RouterScore::SoftmaxOfSelected, ..SOFTMAX };

/// Granite with experts, and with a shared expert besides.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    GRANITE,
    Architecture {
        name: "granitemoeshared",
        config: |fields| {
            let mut config = granite(fields, "granitemoeshared")?;
            // 0 says that there is no shared expert.
            let shared = fields.size(NAMES.mixture.shared, 0, limits::INTERMEDIATE)?.unwrap_or(1024);
            if let Some(mixture) = config.mixture.as_mut().filter(|_| shared > 0) {
                mixture.shared = Some(SharedExpert { intermediate: shared, gated: false });
            }
            config.checked(&NAMES)
        },
        gguf: None,
        ..GRANITE
    },
];

const GRANITE: Architecture = Architecture {
    name: "granitemoe",
    config: |fields| granite(fields, "granitemoe")?.checked(&NAMES),
    harmless: mixtral::HARMLESS,
    tensors: Names {
        own: &[
            TensorName::of(&[Part::Router], "layers.{}.block_sparse_moe.router.layer"),
            TensorName::of(&[Part::ExpertGate, Part::ExpertUp], "layers.{}.block_sparse_moe.input_linear"),
            TensorName::of(&[Part::ExpertDown], "layers.{}.block_sparse_moe.output_linear"),
            TensorName::of(&[Part::SharedGate, Part::SharedUp], "layers.{}.shared_mlp.input_linear"),
            TensorName::of(&[Part::SharedDown], "layers.{}.shared_mlp.output_linear"),
        ],
        ..Names::HUGGING_FACE
    },
    blocks: Blocks { embed: |build, table| build.embed_scaled(table), layer: llama::layer },
    gguf: Some(Gguf { name: "granitemoe", config: from_gguf, tensors: Names::GGUF, export: None }),
    ..MIXTRAL
};

fn granite(fields: &Fields<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    let mut config = hugging_face::decoder(fields, architecture, &NAMES, &Defaults::LLAMA)?;
    config.biases = Biases::of(fields.flag("attention_bias")?.unwrap_or(false), false);
    config.rotate_all(rope::read(fields, RopeDefaults::of(&config))?);
    let factor = |field: &str| Ok(fields.positive(field)?.unwrap_or(1.0) as f32);
    config.embedding_scale = factor("embedding_multiplier")?;
    config.residual_scale = factor("residual_multiplier")?;
    config.logit_scale = 1.0 / factor("logits_scaling")?;
    let scale = factor("attention_multiplier")?;
    config.attention.iter_mut().for_each(|layer| layer.scale = scale);
    let defaults =
        MixtureDefaults { experts: Some(8), top_k: Some(2), intermediate: Some(config.intermediate) };
    let mixture = mixture_fields::read(fields, &NAMES.mixture, defaults, ROUTER, config.layers)?;
    Ok(DecoderConfig { mixture: Some(mixture), ..config })
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, "granitemoe", &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Neighbours, false)?);
    let factor = |key: &str| {
        let missing = || ConfigError::Missing { field: keys.path(key) };
        keys.positive(key)?.ok_or_else(missing)
    };
    config.embedding_scale = factor("embedding_scale")?;
    config.residual_scale = factor("residual_scale")?;
    config.logit_scale = 1.0 / factor("logit_scale")?;
    let scale = factor("attention.scale")?;
    config.attention.iter_mut().for_each(|layer| layer.scale = scale);
    let mixture = mixture_fields::from_gguf(keys, Some(config.intermediate), ROUTER, config.layers)?;
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&FieldNames::GGUF)
}
