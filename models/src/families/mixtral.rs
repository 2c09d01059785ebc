//! Mixtral: Llama's layer with a mixture of experts in place of the MLP.
//!
//! The router computes the softmax over all experts, chooses the best, and divides their weights by their sum.
//!
//! Defaults: `num_key_value_heads` 8, `max_position_embeddings` 131072, `rms_norm_eps` 1e-5, `rope_theta` 1000000,
//! `num_local_experts` 8, `num_experts_per_tok` 2, no sliding window.
//!
//! GGUF files have the architecture `llama` and pair neighbours.

use super::{
    architecture::{Architecture, Gguf},
    llama::LLAMA,
};
use crate::{
    config::{
        DecoderConfig, FieldNames, Result,
        fields::Fields,
        gguf::{self, Keys},
        hugging_face::{self, Defaults},
        mixture::{MixtureNames, SOFTMAX},
        mixture_fields::{self, MixtureDefaults},
        rope::json::{self as rope, RopeDefaults},
    },
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::op::{MoeRoute, Nonlinearity, RopePairing, RouterNorm};

const NAMES: FieldNames = FieldNames::HUGGING_FACE;

const ROUTER: MoeRoute = MoeRoute { norm: RouterNorm::Sum, ..SOFTMAX };

/// Mixtral.
pub(super) const ARCHITECTURES: &[Architecture] = &[MIXTRAL];

/// Mixtral; other families with experts change only what differs.
pub(super) const MIXTRAL: Architecture = Architecture {
    name: "mixtral",
    config,
    harmless: HARMLESS,
    tensors: Names {
        own: &[
            TensorName::of(&[Part::Router], "layers.{}.block_sparse_moe.gate"),
            TensorName::of(&[Part::ExpertGate], "layers.{}.block_sparse_moe.experts.{}.w1"),
            TensorName::of(&[Part::ExpertUp], "layers.{}.block_sparse_moe.experts.{}.w3"),
            TensorName::of(&[Part::ExpertDown], "layers.{}.block_sparse_moe.experts.{}.w2"),
        ],
        ..Names::HUGGING_FACE
    },
    blocks: LLAMA.blocks,
    gguf: Some(Gguf { name: "llama", config: from_gguf, tensors: Names::GGUF, export: None }),
    writable: false,
};

/// Fields of routers that have an effect in training only.
pub(super) const HARMLESS: &[&str] = &["output_router_logits", "router_jitter_noise"];

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let defaults = Defaults { kv_heads: Some(8), context: 131_072, eps: 1e-5, ..Defaults::LLAMA };
    let mut config = hugging_face::decoder(fields, "mixtral", &NAMES, &defaults)?;
    let defaults = RopeDefaults { theta: 1_000_000.0, ..RopeDefaults::of(&config) };
    config.rotate_all(rope::read(fields, defaults)?);
    config.set_windows(vec![hugging_face::sliding_window(fields, None)?; config.layers]);
    let defaults =
        MixtureDefaults { experts: Some(8), top_k: Some(2), intermediate: Some(config.intermediate) };
    let mixture = mixture_fields::read(fields, &MixtureNames::MIXTRAL, defaults, ROUTER, config.layers)?;
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&NAMES)
}

/// Reads a file of the architecture `llama` that has experts.
pub(super) fn from_gguf(keys: &Keys<'_>) -> Result<DecoderConfig> {
    let mut config = gguf::decoder(keys, "mixtral", &FieldNames::GGUF, Nonlinearity::Silu)?;
    config.rotate_all(gguf::rope(keys, &config, RopePairing::Neighbours, false)?);
    gguf::no_window(keys, config.context)?;
    let mixture = mixture_fields::from_gguf(keys, Some(config.intermediate), ROUTER, config.layers)?;
    DecoderConfig { mixture: Some(mixture), ..config }.checked(&FieldNames::GGUF)
}
