//! The errors of reading a configuration.

use std::fmt::Display;

/// An error in a configuration. The message names the field; the caller that reads the file adds its path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file is not a JSON object.
    #[error("it is not valid JSON: {message}")]
    Json {
        /// The error of the JSON parser, with its position.
        message: String,
    },
    /// The model is of a family that is not supported.
    #[error("architecture \"{found}\" ({field}) is not supported; supported: {}", .supported.join(", "))]
    Architecture {
        /// The field with the name of the architecture.
        field: &'static str,
        /// The name of the architecture.
        found: String,
        /// The supported names.
        supported: Vec<&'static str>,
    },
    /// A required field is missing.
    #[error("{field} is missing")]
    Missing {
        /// The field.
        field: String,
    },
    /// A field has an invalid value.
    #[error("{field} is {value}, but must be {expected}")]
    Value {
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// What the value must be.
        expected: String,
    },
    /// A field requests something that is not supported and would change the result.
    #[error("{field} = {value} is not supported: {reason}")]
    Unsupported {
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// The reason, and what is supported.
        reason: String,
    },
    /// An unknown field, which might change the result.
    #[error(
        "{field} = {value} is not a field that is known for {architecture}, and it may change what the model computes; \
         remove it or set it to null if it has no effect"
    )]
    Unknown {
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// The architecture.
        architecture: &'static str,
    },
    /// Two fields contradict each other.
    #[error("{first} and {second} contradict each other; keep the one that is meant")]
    Contradiction {
        /// One field and its value.
        first: String,
        /// The other field and its value.
        second: String,
    },
}

impl ConfigError {
    pub(crate) fn architecture(
        field: &'static str,
        found: &str,
        supported: impl Iterator<Item = &'static str>,
    ) -> Self {
        Self::Architecture { field, found: found.chars().take(80).collect(), supported: supported.collect() }
    }

    pub(crate) fn value(field: impl Into<String>, value: impl Display, expected: impl Into<String>) -> Self {
        Self::Value { field: field.into(), value: value.to_string(), expected: expected.into() }
    }

    pub(crate) fn unsupported(
        field: impl Into<String>,
        value: impl Display,
        reason: impl Into<String>,
    ) -> Self {
        Self::Unsupported { field: field.into(), value: value.to_string(), reason: reason.into() }
    }
}
