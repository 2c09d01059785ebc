//! ModernBERT: an encoder with norms in front of attention and MLP, rotary embeddings, gated MLPs and local attention.
//!
//! Every third layer attends to all tokens; the others to those within half of `local_attention` on either side, with a rotary
//! embedding of a smaller base. The first layer has no norm in front of attention, since one follows the embedding.
//!
//! Defaults: `vocab_size` 50368, `max_position_embeddings` 8192, `global_attn_every_n_layers` 3, `local_attention` 128,
//! `global_rope_theta` 160000, `local_rope_theta` 10000, `norm_eps` 1e-5, `hidden_activation` gelu, `classifier_pooling` cls,
//! `classifier_activation` gelu, `num_attention_heads` 12, no biases.

use super::architecture::Architecture;
use crate::{
    config::{
        Biases, Classifier, ConfigError, DecoderConfig, Encoder, FieldNames, Norm, Result,
        encoder::{self, EncoderReader},
        fields::{Fields, shortened},
        hugging_face::{self, Defaults},
        limits,
        rope::{RopesByKind, json::RopeDefaults},
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::{Result as CoreResult, op::Nonlinearity, program::ValueId};

/// ModernBERT.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "modernbert",
    config,
    // The type of positions is left over from BERT.
    harmless: &[
        "classifier_dropout",
        "cls_token_id",
        "compile",
        "decoder_bias",
        "deterministic_flash_attn",
        "embedding_dropout",
        "gradient_checkpointing",
        "initializer_cutoff_factor",
        "layer_norm_eps",
        "mlp_dropout",
        "position_embedding_type",
        "reference_compile",
        "repad_logits_with_grad",
        "sparse_pred_ignore_index",
        "sparse_prediction",
    ],
    tensors: Names {
        prefixes: &["model.", ""],
        own: TENSORS,
        shared: &[],
        no_weights: &["head.", "decoder."],
        other: None,
    },
    blocks: Blocks { embed: |build, table| build.embed_text(table, false), layer },
    gguf: None,
    writable: false,
}];

const TENSORS: &[TensorName] = &[
    TensorName::of(&[Part::Embedding], "embeddings.tok_embeddings"),
    TensorName::of(&[Part::EmbeddingNorm], "embeddings.norm"),
    TensorName::of(&[Part::AttentionNorm], "layers.{}.attn_norm"),
    TensorName::of(&[Part::Query, Part::Key, Part::Value], "layers.{}.attn.Wqkv"),
    TensorName::of(&[Part::Output], "layers.{}.attn.Wo"),
    TensorName::of(&[Part::MlpNorm], "layers.{}.mlp_norm"),
    TensorName::of(&[Part::Gate, Part::Up], "layers.{}.mlp.Wi"),
    TensorName::of(&[Part::Down], "layers.{}.mlp.Wo"),
    TensorName::of(&[Part::FinalNorm], "final_norm"),
    TensorName::of(&[Part::Pooler], "head.dense").without_prefix(),
    TensorName::of(&[Part::PoolerNorm], "head.norm").without_prefix(),
    TensorName::of(&[Part::Classifier], "classifier").without_prefix(),
];

const NAMES: FieldNames = FieldNames {
    kv_heads: "num_attention_heads",
    head_dim: None,
    eps: Some("norm_eps"),
    activation: "hidden_activation",
    window: "local_attention",
    ..FieldNames::HUGGING_FACE
};

/// Computes `x + attention(norm(x))`, then `x + mlp(norm(x))`.
fn layer(build: &mut Builder<'_>, x: ValueId) -> CoreResult<ValueId> {
    let first = build.is_first_layer();
    let x = build.residual(x, |build, x| {
        let x = if first { x } else { build.norm(x, Part::AttentionNorm)? };
        let heads = build.heads(x)?;
        let heads = build.rotate(heads)?;
        build.attend(heads)
    })?;
    build.residual(x, |build, x| {
        let x = build.norm(x, Part::MlpNorm)?;
        build.gated_mlp(x)
    })
}

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let head = Classifier {
        function: hugging_face::activation(fields, "classifier_activation", Nonlinearity::GeluErf)?,
        bias: fields.flag("classifier_bias")?.unwrap_or(false),
        norm: true,
        mean: match fields.text("classifier_pooling")? {
            None | Some("cls") => false,
            Some("mean") => true,
            Some(other) => {
                let field = fields.path("classifier_pooling");
                return Err(ConfigError::unsupported(
                    field,
                    shortened(&other.into()),
                    "it can be cls or mean",
                ));
            }
        },
        ..Classifier::FIRST_TOKEN
    };
    let encoder = Encoder {
        token_types: 0,
        embedding_norm: true,
        layers_per_group: 1,
        classifier: encoder::classifier(fields, head)?,
    };
    let defaults = Defaults {
        heads: Some(12),
        vocabulary: Some(50_368),
        context: 8192,
        eps: 1e-5,
        activation: Nonlinearity::GeluErf,
        ..Defaults::LLAMA
    };
    let mut config =
        EncoderReader { architecture: "modernbert", names: &NAMES, defaults }.read(fields, encoder)?;
    (config.norm_after, config.final_norm) = (false, true);
    config.norm = Norm::Layer { weight: true, bias: fields.flag("norm_bias")?.unwrap_or(false) };
    let attention = fields.flag("attention_bias")?.unwrap_or(false);
    config.biases = Biases::of(attention, fields.flag("mlp_bias")?.unwrap_or(false));
    // Half of the keys are on either side of the query's own.
    let local = fields.size(NAMES.window, 0, limits::CONTEXT)?.unwrap_or(128);
    let window = u32::try_from(local / 2 + 1).ok();
    let period = fields.size("global_attn_every_n_layers", 1, usize::MAX)?.unwrap_or(3);
    let sliding = |layer: usize| !layer.is_multiple_of(period);
    config.set_windows(hugging_face::windows(fields, config.layers, window, sliding)?);
    let theta = fields.positive("global_rope_theta")?.unwrap_or(160_000.0);
    let local_theta = fields.positive("local_rope_theta")?.unwrap_or(10_000.0);
    let defaults = RopeDefaults { theta, ..RopeDefaults::of(&config) };
    config.rotate_by_kind(RopesByKind::read(fields, Some(local_theta), defaults)?);
    config.checked(&NAMES)
}
