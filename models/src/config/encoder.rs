//! The parts of an encoder that a decoder does not have, and how the families of encoders read them.

use super::{
    Biases, ConfigError, DecoderConfig, FieldNames, Norm, Result,
    fields::{Fields, shortened},
    hugging_face::{self, Defaults},
    limits,
};
use dsrun_core::op::Nonlinearity;

/// The ending of the names of classes in transformers that classify texts.
const CLASSIFIES: &str = "ForSequenceClassification";

/// The largest number of labels that is accepted.
const MOST_LABELS: usize = 1 << 16;

/// What makes a model an encoder: every token attends to all tokens of its text, and the model turns texts into vectors or scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Encoder {
    /// Rows of the table of token types; 0 if the model has no such table.
    pub token_types: usize,
    /// Whether a norm follows the embedding.
    pub embedding_norm: bool,
    /// The number of consecutive layers that share their weights; 1 if each layer has its own.
    pub layers_per_group: usize,
    /// The classification head, if the model has one.
    pub classifier: Option<Classifier>,
}

/// A head that turns a text into scores: a linear layer with a non-linear function, perhaps a norm, and a linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Classifier {
    /// The number of scores.
    pub labels: usize,
    /// The function behind the first linear layer.
    pub function: Nonlinearity,
    /// Whether the first linear layer has a bias.
    pub bias: bool,
    /// Whether a norm follows the function.
    pub norm: bool,
    /// Whether the head reads the mean over all tokens instead of the first token.
    pub mean: bool,
    /// Whether the score of a text is the sigmoid of what the head computes, in models with one label.
    pub sigmoid: bool,
}

/// What the readers of encoders have in common.
pub(crate) struct EncoderReader {
    /// The name of the architecture.
    pub(crate) architecture: &'static str,
    /// The names of its fields.
    pub(crate) names: &'static FieldNames,
    /// The values of fields that may be left out.
    pub(crate) defaults: Defaults,
}

impl EncoderReader {
    /// Reads the fields that encoders share with decoders. The result is of BERT's form: norms with weights and biases behind the
    /// residual sums, biases everywhere, no rotary embedding.
    pub(crate) fn read(&self, fields: &Fields<'_>, encoder: Encoder) -> Result<DecoderConfig> {
        let config = hugging_face::decoder(fields, self.architecture, self.names, &self.defaults)?;
        // What ties the embedding to is the head of pre-training, which is not read.
        Ok(DecoderConfig {
            encoder: Some(encoder),
            norm: Norm::LAYER,
            norm_after: true,
            final_norm: false,
            biases: Biases { gate: false, ..Biases::ALL },
            tied: false,
            ..config
        })
    }
}

impl Classifier {
    /// The head of BERT, for two labels: it reads the first token, through a layer with tanh.
    pub(crate) const FIRST_TOKEN: Self =
        Self { labels: 2, function: Nonlinearity::Tanh, bias: true, norm: false, mean: false, sigmoid: true };
}

/// Reads whether the model is one that classifies texts, and into how many labels. `head` is the form of its head.
pub(crate) fn classifier(fields: &Fields<'_>, head: Classifier) -> Result<Option<Classifier>> {
    let classes = fields.texts("architectures")?.unwrap_or_default();
    let sigmoid = sigmoid(fields)?;
    if !classes.iter().any(|class| class.ends_with(CLASSIFIES)) {
        return Ok(None);
    }
    let wrong =
        |labels| ConfigError::value(fields.path("id2label"), shortened(labels), "an object with the labels");
    let labels = match fields.value("id2label") {
        Some(labels) => labels.as_object().map(serde_json::Map::len).ok_or_else(|| wrong(labels))?,
        None => fields.size("num_labels", 1, MOST_LABELS)?.unwrap_or(2),
    };
    Ok(Some(Classifier { labels, sigmoid, ..head }))
}

/// Reads whether scores are sigmoids, which cross-encoders of sentence-transformers say in one of two fields.
fn sigmoid(fields: &Fields<'_>) -> Result<bool> {
    let old = fields.text("sbert_ce_default_activation_function")?;
    let function = match fields.object("sentence_transformers")? {
        Some(of_library) => {
            of_library.text("version")?;
            let new = of_library.text("activation_fn")?;
            of_library.refuse_unread("sentence_transformers", |_, _| false)?;
            new.or(old)
        }
        None => old,
    };
    match function {
        None | Some("torch.nn.modules.activation.Sigmoid") => Ok(true),
        Some("torch.nn.modules.linear.Identity") => Ok(false),
        Some(other) => {
            let field = fields.path("sbert_ce_default_activation_function");
            Err(ConfigError::unsupported(
                field,
                other,
                "scores can be sigmoids, or what the head computes (Identity)",
            ))
        }
    }
}

/// Reads the number of token types.
pub(crate) fn token_types(fields: &Fields<'_>, default: usize) -> Result<usize> {
    Ok(fields.size("type_vocab_size", 1, limits::VOCABULARY)?.unwrap_or(default))
}

/// Refuses positions that are not learned vectors that are added to the embedding.
pub(crate) fn expect_absolute_positions(fields: &Fields<'_>) -> Result<()> {
    let reason = "positions must be learned vectors (absolute)";
    hugging_face::expect(fields, "position_embedding_type", "absolute".into(), reason)
}

impl Encoder {
    /// Checks what building the program of an encoder relies on.
    pub(super) fn validate(&self, config: &DecoderConfig) -> Result<()> {
        if self.token_types > limits::VOCABULARY {
            let expected = format!("at most {}", limits::VOCABULARY);
            return Err(ConfigError::value("encoder.token_types", self.token_types, expected));
        }
        if self.layers_per_group == 0 {
            return Err(ConfigError::value("encoder.layers_per_group", 0, "a whole number from 1"));
        }
        match self.classifier {
            Some(classifier) if classifier.labels == 0 || classifier.labels > MOST_LABELS => {
                let expected = format!("a whole number from 1 to {MOST_LABELS}");
                Err(ConfigError::value("encoder.classifier.labels", classifier.labels, expected))
            }
            _ if config.heads * config.head_dim != config.hidden => {
                let expected = format!("{} heads of {} features", config.heads, config.head_dim);
                Err(ConfigError::value("the hidden size of an encoder", config.hidden, expected))
            }
            _ if config.latent.is_some() || config.mixture.is_some() || config.sinks => {
                let expected = "plain attention and an MLP in every layer";
                Err(ConfigError::value("the layers of an encoder", "others", expected))
            }
            _ => Ok(()),
        }
    }
}
