//! DistilBERT: BERT without token types, with tensor names and fields of its own.
//!
//! Defaults: `vocab_size` 30522, `max_position_embeddings` 512, `dim` 768, `hidden_dim` 3072, `n_layers` 6, `n_heads` 12,
//! `activation` gelu, biases everywhere. The epsilon of norms is 1e-12.

use super::{
    architecture::Architecture,
    bert::{BLOCKS, DEFAULTS},
};
use crate::{
    config::{
        Classifier, DecoderConfig, Encoder, FieldNames, Result,
        encoder::{self, EncoderReader},
        fields::Fields,
    },
    tensor_names::{Names, Part, TensorName},
};
use dsrun_core::op::Nonlinearity;

/// DistilBERT.
pub(super) const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "distilbert",
    config,
    harmless: &[
        "dropout",
        "output_past",
        "qa_dropout",
        "seq_classif_dropout",
        // The table of positions is in the file, however it was made.
        "sinusoidal_pos_embds",
        "tie_weights_",
    ],
    tensors: Names {
        prefixes: &["distilbert.", ""],
        own: TENSORS,
        shared: &[],
        no_weights: &["embeddings.position_ids", "vocab_transform.", "vocab_layer_norm.", "vocab_projector."],
        other: None,
    },
    blocks: BLOCKS,
    gguf: None,
    writable: false,
}];

const TENSORS: &[TensorName] = &[
    TensorName::of(&[Part::Embedding], "embeddings.word_embeddings"),
    TensorName::of(&[Part::Positions], "embeddings.position_embeddings"),
    TensorName::of(&[Part::EmbeddingNorm], "embeddings.LayerNorm"),
    TensorName::of(&[Part::Query], "transformer.layer.{}.attention.q_lin"),
    TensorName::of(&[Part::Key], "transformer.layer.{}.attention.k_lin"),
    TensorName::of(&[Part::Value], "transformer.layer.{}.attention.v_lin"),
    TensorName::of(&[Part::Output], "transformer.layer.{}.attention.out_lin"),
    TensorName::of(&[Part::AttentionNorm], "transformer.layer.{}.sa_layer_norm"),
    TensorName::of(&[Part::Up], "transformer.layer.{}.ffn.lin1"),
    TensorName::of(&[Part::Down], "transformer.layer.{}.ffn.lin2"),
    TensorName::of(&[Part::MlpNorm], "transformer.layer.{}.output_layer_norm"),
    TensorName::of(&[Part::Pooler], "pre_classifier").without_prefix(),
    TensorName::of(&[Part::Classifier], "classifier").without_prefix(),
];

const NAMES: FieldNames = FieldNames {
    hidden: "dim",
    layers: "n_layers",
    heads: "n_heads",
    kv_heads: "n_heads",
    head_dim: None,
    intermediate: "hidden_dim",
    embedding: "dim",
    eps: None,
    activation: "activation",
    ..FieldNames::HUGGING_FACE
};

fn config(fields: &Fields<'_>) -> Result<DecoderConfig> {
    let head = Classifier { function: Nonlinearity::Relu, ..Classifier::FIRST_TOKEN };
    let encoder = Encoder {
        token_types: 0,
        embedding_norm: true,
        layers_per_group: 1,
        classifier: encoder::classifier(fields, head)?,
    };
    let reader = EncoderReader { architecture: "distilbert", names: &NAMES, defaults: DEFAULTS };
    reader.read(fields, encoder)?.checked(&NAMES)
}
