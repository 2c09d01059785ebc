//! What each token id stands for: its text in the vocabulary and the bytes it decodes to.

use std::collections::HashMap;
use std::fmt;

use super::error::{Result, TokenizerError};

/// The table of all tokens, by id.
#[derive(Debug)]
pub(super) struct Pieces {
    /// `None` for ids that no token has.
    tokens: Vec<Option<Box<str>>>,
    special: Vec<bool>,
    rule: Rule,
}

/// How the pieces of a text are put together.
pub(super) enum Rule {
    /// The bytes of the tokens in a row.
    Bytes {
        /// The bytes of every token, one after the other.
        bytes: Vec<u8>,
        /// Where each token's bytes end.
        ends: Vec<usize>,
        /// What is different at the start of a text.
        start: TextStart,
    },
    /// A piece depends on the token before it, as with WordPiece. The function decodes a list of tokens.
    Neighbours(Box<dyn Fn(Vec<String>) -> String + Send + Sync>),
}

/// What happens to the first piece of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextStart {
    /// Nothing.
    Kept,
    /// Up to so many spaces are taken off the start of the text.
    WithoutSpaces(usize),
    /// The first token loses all its word markers.
    WithoutMarker(char),
}

impl fmt::Debug for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes { bytes, start, .. } => {
                formatter.debug_struct("Bytes").field("bytes", &bytes.len()).field("start", start).finish()
            }
            Self::Neighbours(_) => formatter.write_str("Neighbours"),
        }
    }
}

impl Pieces {
    /// A table in which `piece` gives the bytes of each token.
    pub(super) fn from_bytes(
        tokens: Vec<Option<Box<str>>>,
        special: Vec<bool>,
        start: TextStart,
        piece: impl Fn(usize, &str) -> Vec<u8>,
    ) -> Self {
        let mut bytes = Vec::new();
        let mut ends = Vec::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            if let Some(token) = token {
                bytes.extend(piece(id, token));
            }
            ends.push(bytes.len());
        }
        Self { tokens, special, rule: Rule::Bytes { bytes, ends, start } }
    }

    /// A table whose pieces depend on the token before.
    pub(super) fn with_neighbours(
        tokens: Vec<Option<Box<str>>>,
        special: Vec<bool>,
        decode: impl Fn(Vec<String>) -> String + Send + Sync + 'static,
    ) -> Self {
        Self { tokens, special, rule: Rule::Neighbours(Box::new(decode)) }
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn rule(&self) -> &Rule {
        &self.rule
    }

    pub(super) fn token(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize)?.as_deref()
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    pub(super) fn check(&self, id: u32) -> Result<()> {
        if (id as usize) < self.len() {
            return Ok(());
        }
        Err(TokenizerError::TokenOutOfRange { id, size: self.len() })
    }

    /// The id of each token text; of two tokens with the same text, the later.
    pub(super) fn ids_by_text(&self) -> HashMap<String, u32> {
        (0u32..)
            .zip(&self.tokens)
            .filter_map(|(id, token)| token.as_ref().map(|token| (token.to_string(), id)))
            .collect()
    }
}

impl Rule {
    /// The bytes of a token, for [`Rule::Bytes`]; none for an id that no token has.
    pub(super) fn bytes_of(bytes: &[u8], ends: &[usize], id: u32) -> impl AsRef<[u8]> {
        let id = id as usize;
        let start = id.checked_sub(1).and_then(|before| ends.get(before)).copied().unwrap_or(0);
        let end = ends.get(id).copied().unwrap_or(start);
        bytes.get(start..end).unwrap_or_default()
    }
}
