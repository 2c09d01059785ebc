//! The errors of the engine.

use crate::memory::{Bytes, MemoryPlan};
use dsrun_models::{chat::ChatError, model::ModelError, tokenizer::TokenizerError};

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The backend or the hardware-abstraction layer refused or failed.
    #[error(transparent)]
    Hal(#[from] dsrun_core::Error),

    /// The model lacks a required part, or cannot be built.
    #[error(transparent)]
    Model(#[from] ModelError),

    /// Text could not be encoded or decoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),

    /// The chat template could not be rendered.
    #[error(transparent)]
    Chat(#[from] ChatError),

    /// An option is out of range.
    #[error("{option} is {value}: {rule}")]
    Option {
        /// The name of the option.
        option: &'static str,
        /// The given value.
        value: String,
        /// The rule that the value violates.
        rule: String,
    },

    /// The model and its caches do not fit into the available memory.
    #[error(
        "the model does not fit: {} are missing\n{plan}\nhint: {}; `dsrun plan` shows what the model needs on several \
         devices",
        Bytes(*missing),
        plan.remedy()
    )]
    DoesNotFit {
        /// Bytes that are missing.
        missing: u64,
        /// The memory that was planned.
        plan: Box<MemoryPlan>,
    },

    /// The part of the KV cache that is kept in host memory does not fit there.
    #[error(
        "the KV cache does not fit into host memory: {} are needed, {} may be used\nhint: a smaller --context, \
         fewer --kv-tokens or fewer requests side by side, or a larger --gpu-memory",
        Bytes(*needed),
        Bytes(*available)
    )]
    HostCache {
        /// Bytes of keys and values in host memory.
        needed: u64,
        /// Bytes that they may take on the host.
        available: u64,
    },

    /// The weights of streamed layers do not fit into the memory of the host.
    #[error(
        "streamed weights do not fit into host memory: {} are needed, {} are available\nhint: --weights-in disk:FOLDER reads layers \
         from disk; or --quantize w8a16 or w4a16, a larger --gpu-memory or --host-memory, or a machine with more memory",
        Bytes(*needed),
        Bytes(*available)
    )]
    HostMemory {
        /// Bytes of the weights in host memory.
        needed: u64,
        /// Bytes available on the host.
        available: u64,
    },

    /// The layers that are read from disk for every step do not fit into the memory of the host two at a time.
    #[error(
        "layers that are read from disk take {} of host memory, two at a time, and {} are available\nhint: raise --host-memory",
        Bytes(*needed),
        Bytes(*available)
    )]
    ReadAhead {
        /// Bytes of two layers.
        needed: u64,
        /// Bytes that weights may take on the host.
        available: u64,
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

    /// A token id is outside the model's vocabulary.
    #[error("token {token} is outside the vocabulary of {vocabulary}")]
    NoSuchToken {
        /// The token id.
        token: u32,
        /// The size of the vocabulary.
        vocabulary: usize,
    },

    /// The vocabulary of a draft model differs from that of the target model.
    #[error(
        "{draft} cannot propose tokens for {model}: {reason}\nhint: a draft model needs the same tokenizer, as smaller models of \
         the same family have"
    )]
    Draft {
        /// The draft model.
        draft: String,
        /// The model.
        model: String,
        /// The difference of the vocabularies.
        reason: String,
    },

    /// The constraint on an answer (grammar, schema, regular expression) failed.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),

    /// No token of the vocabulary may be sampled for a request.
    #[error("no token can be sampled: the model's logits are not finite, or the bias forbids every token")]
    NoToken,

    /// A text has no embedding.
    #[error("the text has no embedding: the model's hidden states are not finite")]
    NoEmbedding,

    /// The model lacks a part that the call needs.
    #[error("the model has no {what}: {hint}")]
    Missing {
        /// The missing part.
        what: &'static str,
        /// What to do about it.
        hint: &'static str,
    },
}

/// The error of a failed constraint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the constraint on the answer failed: {0}")]
pub struct ConstraintError(
    /// The reason.
    pub String,
);

/// A result of the engine.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

impl EngineError {
    /// The error of an option that breaks a rule.
    pub(crate) fn option(option: &'static str, value: impl ToString, rule: impl Into<String>) -> Self {
        Self::Option { option, value: value.to_string(), rule: rule.into() }
    }
}
