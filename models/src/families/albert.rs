//! ALBERT: BERT whose layers share their weights, with an embedding that is narrower than the layers.
//!
//! The layers are divided into `num_hidden_groups` groups; those of a group have the same weights, which are kept once.
//!
//! Defaults: `vocab_size` 30000, `embedding_size` 128, `max_position_embeddings` 512, `type_vocab_size` 2, `num_hidden_groups` 1,
//! `inner_group_num` 1, `layer_norm_eps` 1e-12, `hidden_act` gelu_new, `num_attention_heads` 64, biases everywhere.

use super::{
    architecture::Architecture,
    bert::{self, DEFAULTS, HARMLESS},
};
use crate::{
    config::{
        Classifier, ConfigError, DecoderConfig, Encoder, FieldNames, Result,
        encoder::{self, EncoderReader},
        fields::Fields,
        hugging_face::{self, Defaults},
        limits,
    },
    layers::{Blocks, Builder},
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::{Result as CoreResult, op::Nonlinearity, program::ValueId};

/// ALBERT.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "albert",
    config,
    harmless: ALBERT_HARMLESS,
    tensors: Names {
        prefixes: &["albert.", ""],
        own: TENSORS,
        shared: &[],
        no_weights: &["embeddings.position_ids", "pooler.", "predictions.", "sop_classifier."],
        other: None,
    },
    blocks: Blocks { embed, layer: bert::BLOCKS.layer },
    gguf: None,
    writable: false,
}];

const ALBERT_HARMLESS: &[&str] = &[
    HARMLESS[0],
    HARMLESS[2],
    "classifier_dropout_prob",
    "down_scale_factor",
    "eos_token_ids",
    "gap_size",
    "net_structure_type",
    "num_memory_blocks",
    "output_past",
];

const TENSORS: &[TensorName] = &[
    TensorName::of(&[Part::Embedding], "embeddings.word_embeddings"),
    TensorName::of(&[Part::Positions], "embeddings.position_embeddings"),
    TensorName::of(&[Part::TokenTypes], "embeddings.token_type_embeddings"),
    TensorName::of(&[Part::EmbeddingNorm], "embeddings.LayerNorm"),
    TensorName::of(&[Part::ProjectIn], "encoder.embedding_hidden_mapping_in"),
    TensorName::of(&[Part::Query], "encoder.albert_layer_groups.{}.albert_layers.0.attention.query"),
    TensorName::of(&[Part::Key], "encoder.albert_layer_groups.{}.albert_layers.0.attention.key"),
    TensorName::of(&[Part::Value], "encoder.albert_layer_groups.{}.albert_layers.0.attention.value"),
    TensorName::of(&[Part::Output], "encoder.albert_layer_groups.{}.albert_layers.0.attention.dense"),
    TensorName::of(
        &[Part::AttentionNorm],
        "encoder.albert_layer_groups.{}.albert_layers.0.attention.LayerNorm",
    ),
    TensorName::of(&[Part::Up], "encoder.albert_layer_groups.{}.albert_layers.0.ffn"),
    TensorName::of(&[Part::Down], "encoder.albert_layer_groups.{}.albert_layers.0.ffn_output"),
    TensorName::of(&[Part::MlpNorm], "encoder.albert_layer_groups.{}.albert_layers.0.full_layer_layer_norm"),
    TensorName::of(&[Part::Pooler], "pooler"),
    TensorName::of(&[Part::Classifier], "classifier").without_prefix(),
];

const NAMES: FieldNames = FieldNames { embedding: "embedding_size", ..bert::NAMES };

/// Computes the sum of embeddings and its norm, and projects it to the width of the layers.
fn embed(build: &mut Builder<'_>, table: ValueId) -> CoreResult<ValueId> {
    let x = build.embed_text(table, true)?;
    build.linear(x, Part::ProjectIn)
}

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    encoder::expect_absolute_positions(fields)?;
    hugging_face::expect(
        fields,
        "inner_group_num",
        1.into(),
        "a group must consist of one layer that is repeated (1)",
    )?;
    let groups = fields.size("num_hidden_groups", 1, limits::LAYERS)?.unwrap_or(1);
    let encoder = Encoder {
        token_types: encoder::token_types(fields, 2)?,
        embedding_norm: true,
        layers_per_group: 1,
        classifier: encoder::classifier(fields, Classifier::FIRST_TOKEN)?,
    };
    let defaults = Defaults {
        heads: Some(64),
        vocabulary: Some(30_000),
        activation: Nonlinearity::GeluTanh,
        ..DEFAULTS
    };
    let embedding = fields.size(NAMES.embedding, 1, limits::HIDDEN)?.unwrap_or(128);
    let mut config =
        EncoderReader { architecture: "albert", names: &NAMES, defaults }.read(fields, encoder)?;
    config.embedding = embedding;
    if !config.layers.is_multiple_of(groups) {
        let expected = format!("a divisor of {} ({})", config.layers, NAMES.layers);
        return Err(ConfigError::value(fields.path("num_hidden_groups"), groups, expected));
    }
    config.encoder = Some(Encoder { layers_per_group: config.layers / groups, ..encoder });
    config.checked(&NAMES)
}
