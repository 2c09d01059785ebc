//! The errors of the engine.

use crate::{
    memory::{Bytes, MemoryPlan},
    request::ConstraintError,
};
use dsrun_models::{chat::ChatError, model::ModelError, tokenizer::TokenizerError};

/// Why the engine could not do something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The backend, or the layer above it, refused or failed.
    #[error(transparent)]
    Hal(#[from] dsrun_core::Error),

    /// The model lacks something, or cannot be built.
    #[error(transparent)]
    Model(#[from] ModelError),

    /// Text could not be turned into tokens or back.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),

    /// The chat template could not be rendered.
    #[error(transparent)]
    Chat(#[from] ChatError),

    /// An option is out of range.
    #[error("{option} is {value}: {rule}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// The value given.
        value: String,
        /// What it must be.
        rule: String,
    },

    /// The model and its caches do not fit into the memory there is.
    #[error(
        "the model does not fit: {} are missing\n{plan}\nhint: {}",
        Bytes(*missing),
        plan.remedy()
    )]
    DoesNotFit {
        /// Bytes that are missing.
        missing: u64,
        /// What was planned.
        plan: Box<MemoryPlan>,
    },

    /// A prompt is longer than the context.
    #[error(
        "the prompt has {tokens} tokens, but the context holds {context}: shorten it, or raise --context"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens the context holds.
        context: usize,
    },

    /// A request has no tokens.
    #[error("the prompt is empty: there is nothing to continue")]
    EmptyPrompt,

    /// A token id is no token of the model.
    #[error("token {token} is outside the vocabulary of {vocabulary}")]
    NoSuchToken {
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },

    /// A second model has another vocabulary than the model that it would propose tokens for.
    #[error(
        "{draft} cannot propose tokens for {model}: {reason}\nhint: a draft model needs the same tokenizer, as smaller models of \
         the same family have"
    )]
    Draft {
        /// The second model.
        draft: String,
        /// The model.
        model: String,
        /// How their vocabularies differ.
        reason: String,
    },

    /// What an answer has to look like could not be kept to.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),

    /// A request has no token left to sample.
    #[error(
        "no token is left to sample: the model's logits are not numbers, or a bias takes all of them away"
    )]
    NoToken,

    /// A text has no vector.
    #[error("there is no vector: the model's hidden states are not numbers")]
    NoEmbedding,

    /// The model came without something that is needed for what was asked.
    #[error("the model has no {what}: {hint}")]
    Missing {
        /// What is missing.
        what: &'static str,
        /// What to do.
        hint: &'static str,
    },
}

/// Shorthand for results of the engine.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

impl EngineError {
    /// An option is out of range.
    pub(crate) fn option(option: &'static str, value: impl ToString, rule: impl Into<String>) -> Self {
        Self::Option { option, value: value.to_string(), rule: rule.into() }
    }
}
