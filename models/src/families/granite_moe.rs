//! Granite with experts: Mixtral's layer with factors on embeddings, attention scores, residual branches and logits.
//!
//! The router chooses by logits; weights are the softmax over the chosen experts. Files store the experts of a layer as one
//! tensor, gate before up. `granitemoeshared` has a shared expert without a gate; GGUF files have one architecture for both.
//!
//! Defaults: `num_key_value_heads` the number of query heads, `embedding_multiplier`, `attention_multiplier`,
//! `residual_multiplier` and `logits_scaling` 1, `num_local_experts` 8, `num_experts_per_tok` 2.

use super::{
    architecture::{Architecture, Gguf},
    granite,
    mixtral::{self, MIXTRAL},
};
use crate::{
    config::{
        Biases, DecoderConfig, FieldNames, Result, SharedExpert,
        fields::Fields,
        gguf::Keys,
        hugging_face::{self, Defaults},
        limits,
        mixture::{MixtureNames, SOFTMAX},
        mixture_fields::{self, MixtureDefaults},
        rope::json::{self as rope, RopeDefaults},
    },
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::op::{MoeRoute, RouterScore};

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
    blocks: granite::BLOCKS,
    gguf: Some(Gguf { name: "granitemoe", config: from_gguf, tensors: Names::GGUF, export: None }),
    ..MIXTRAL
};

fn granite(fields: &Fields<'_>, architecture: &'static str) -> Result<DecoderConfig> {
    let mut config = hugging_face::decoder(fields, architecture, &NAMES, &Defaults::LLAMA)?;
    config.biases = Biases::of(fields.flag("attention_bias")?.unwrap_or(false), false);
    config.rotate_all(rope::read(fields, RopeDefaults::of(&config))?);
    granite::read_factors(fields, &mut config)?;
    let defaults =
        MixtureDefaults { experts: Some(8), top_k: Some(2), intermediate: Some(config.intermediate) };
    let mixture = mixture_fields::read(fields, &NAMES.mixture, defaults, ROUTER, config.layers)?;
    Ok(DecoderConfig { mixture: Some(mixture), ..config })
}

fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = granite::decoder_from_gguf(keys, "granitemoe")?;
    let mut mixture = mixture_fields::from_gguf(keys, Some(config.intermediate), ROUTER, config.layers)?;
    // As in llama.cpp, 0 says that there is no shared expert.
    let shared = keys.get::<u32>(MixtureNames::GGUF.shared)?.unwrap_or(0) as usize;
    if shared > 0 {
        config.architecture = "granitemoeshared";
        mixture.shared = Some(SharedExpert { intermediate: shared, gated: false });
    }
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&FieldNames::GGUF)
}
