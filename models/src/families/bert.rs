//! BERT: an encoder with learned positions and token types, and norms behind the residual sums.
//!
//! Its head for classification reads the first token through a layer with tanh, the pooler. Other models have the tensors of the
//! pooler and of the heads of pre-training too, which are not read.
//!
//! Defaults: `vocab_size` 30522, `max_position_embeddings` 512, `type_vocab_size` 2, `layer_norm_eps` 1e-12, `hidden_act` gelu,
//! `num_attention_heads` 12, biases everywhere.

use super::architecture::Architecture;
use crate::{
    config::{
        Classifier, DecoderConfig, Encoder, FieldNames, Result,
        encoder::{self, EncoderReader},
        fields::Fields,
        hugging_face::Defaults,
    },
    layers::Blocks,
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::op::Nonlinearity;

/// BERT.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "bert",
    config,
    harmless: HARMLESS,
    tensors: Names {
        prefixes: &["bert.", ""],
        own: TENSORS,
        shared: &[],
        no_weights: &["embeddings.position_ids", "pooler.", "cls."],
        other: None,
    },
    blocks: BLOCKS,
    gguf: None,
    writable: false,
}];

/// The blocks of all encoders with learned positions.
pub(super) const BLOCKS: Blocks = Blocks {
    embed: |build, table| build.embed_text(table, true),
    layer: |build, x| build.post_norm_layer(x),
};

/// Fields of BERT and its relatives that do not change the result.
pub(super) const HARMLESS: &[&str] = &[
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "hidden_dropout_prob",
    "output_past",
    // Of the head of another task.
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
];

const TENSORS: &[TensorName] = &[
    TensorName::of(&[Part::Embedding], "embeddings.word_embeddings"),
    TensorName::of(&[Part::Positions], "embeddings.position_embeddings"),
    TensorName::of(&[Part::TokenTypes], "embeddings.token_type_embeddings"),
    TensorName::of(&[Part::EmbeddingNorm], "embeddings.LayerNorm"),
    TensorName::of(&[Part::Query], "encoder.layer.{}.attention.self.query"),
    TensorName::of(&[Part::Key], "encoder.layer.{}.attention.self.key"),
    TensorName::of(&[Part::Value], "encoder.layer.{}.attention.self.value"),
    TensorName::of(&[Part::Output], "encoder.layer.{}.attention.output.dense"),
    TensorName::of(&[Part::AttentionNorm], "encoder.layer.{}.attention.output.LayerNorm"),
    TensorName::of(&[Part::Up], "encoder.layer.{}.intermediate.dense"),
    TensorName::of(&[Part::Down], "encoder.layer.{}.output.dense"),
    TensorName::of(&[Part::MlpNorm], "encoder.layer.{}.output.LayerNorm"),
    TensorName::of(&[Part::Pooler], "pooler.dense"),
    TensorName::of(&[Part::Classifier], "classifier").without_prefix(),
];

/// The names of BERT's fields.
pub(super) const NAMES: FieldNames = FieldNames {
    kv_heads: "num_attention_heads",
    head_dim: None,
    eps: Some("layer_norm_eps"),
    ..FieldNames::HUGGING_FACE
};

/// The defaults of BERT's fields.
pub(super) const DEFAULTS: Defaults = Defaults {
    heads: Some(12),
    mlp_ratio: Some(4),
    vocabulary: Some(30_522),
    context: 512,
    eps: 1e-12,
    activation: Nonlinearity::GeluErf,
    ..Defaults::LLAMA
};

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    encoder::expect_absolute_positions(fields)?;
    let encoder = Encoder {
        token_types: encoder::token_types(fields, 2)?,
        embedding_norm: true,
        layers_per_group: 1,
        classifier: encoder::classifier(fields, Classifier::FIRST_TOKEN)?,
    };
    EncoderReader { architecture: "bert", names: &NAMES, defaults: DEFAULTS }
        .read(fields, encoder)?
        .checked(&NAMES)
}
