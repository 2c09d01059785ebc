//! RoBERTa and XLM-RoBERTa: BERT with other tensor names, positions counted from 2, and a head without a pooler.
//!
//! Defaults: `vocab_size` 50265, `max_position_embeddings` 512 (two of which are unused), `type_vocab_size` 2, `pad_token_id` 1,
//! `layer_norm_eps` 1e-12, `hidden_act` gelu, `num_attention_heads` 12, biases everywhere.

use super::{
    architecture::Architecture,
    bert::{BLOCKS, DEFAULTS, HARMLESS, NAMES},
};
use crate::{
    config::{
        Classifier, ConfigError, DecoderConfig, Encoder, Result,
        encoder::{self, EncoderReader},
        fields::Fields,
        hugging_face::{self, Defaults},
    },
    tensor_names::{Names, Part, TensorName},
};

/// RoBERTa, and the model for many languages that has its form.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    ROBERTA,
    Architecture { name: "xlm-roberta", config: |fields| config(fields, "xlm-roberta", 250_002), ..ROBERTA },
];

const ROBERTA: Architecture = Architecture {
    name: "roberta",
    config: |fields| config(fields, "roberta", 50_265),
    harmless: HARMLESS,
    tensors: Names {
        prefixes: &["roberta.", ""],
        own: TENSORS,
        shared: &[],
        no_weights: &["embeddings.position_ids", "pooler.", "lm_head."],
        other: None,
    },
    blocks: BLOCKS,
    gguf: None,
    writable: false,
};

/// The rows of the table of positions before the first: they were meant for padding.
const UNUSED_POSITIONS: usize = 2;

const TENSORS: &[TensorName] = &[
    TensorName::of(&[Part::Embedding], "embeddings.word_embeddings"),
    TensorName::of(&[Part::Positions], "embeddings.position_embeddings").after_unused(UNUSED_POSITIONS),
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
    TensorName::of(&[Part::Pooler], "classifier.dense").without_prefix(),
    TensorName::of(&[Part::Classifier], "classifier.out_proj").without_prefix(),
];

fn config(fields: &Fields<'_>, architecture: &'static str, vocabulary: usize) -> Result<DecoderConfig> {
    encoder::expect_absolute_positions(fields)?;
    hugging_face::expect(
        fields,
        "pad_token_id",
        1.into(),
        "positions are counted from 2, one after the padding token (1)",
    )?;
    let encoder = Encoder {
        token_types: encoder::token_types(fields, 2)?,
        embedding_norm: true,
        layers_per_group: 1,
        classifier: encoder::classifier(fields, Classifier::FIRST_TOKEN)?,
    };
    let defaults = Defaults { vocabulary: Some(vocabulary), ..DEFAULTS };
    let mut config = EncoderReader { architecture, names: &NAMES, defaults }.read(fields, encoder)?;
    config.context = match config.context.checked_sub(UNUSED_POSITIONS) {
        Some(context) if context > 0 => context,
        _ => {
            return Err(ConfigError::value(
                fields.path(NAMES.context),
                config.context,
                "at least 3, two of which are unused",
            ));
        }
    };
    config.checked(&NAMES)
}
