//! What can be wrong with a configuration.

use std::fmt::Display;

/// Why a configuration cannot be followed. The message names the field; who reads the file adds its path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file is not a JSON object.
    #[error("it is not valid JSON: {message}")]
    Json {
        /// What is wrong and where.
        message: String,
    },
    /// The model is of a family that is not supported.
    #[error("architecture \"{found}\" ({field}) is not supported; supported: {}", .supported.join(", "))]
    Architecture {
        /// The field that names it.
        field: &'static str,
        /// The name.
        found: String,
        /// The names that would be understood.
        supported: Vec<&'static str>,
    },
    /// A field is missing that has no default.
    #[error("{field} is missing")]
    Missing {
        /// The field.
        field: String,
    },
    /// A field has a value that it cannot have.
    #[error("{field} is {value}, but must be {expected}")]
    Value {
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// What it has to be.
        expected: String,
    },
    /// A field asks for something that is not supported and would change the result.
    #[error("{field} = {value} is not supported: {reason}")]
    Unsupported {
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// Why, and what would be.
        reason: String,
    },
    /// A field that nobody here knows.
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
    /// Two fields say different things.
    #[error("{first} and {second} contradict each other; keep the one that is meant")]
    Contradiction {
        /// A field and its value.
        first: String,
        /// Another.
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
