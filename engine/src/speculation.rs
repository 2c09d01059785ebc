//! Speculation: tokens are proposed cheaply, and the model checks several in one step.
//!
//! A step that brings what was proposed behind a request's last token samples at each of these places. The draw at a place
//! depends on the tokens before it, on seed and position alone, so as long as each draw is what was proposed, the next is
//! the one that would have come anyway. What follows the first that differs is dropped. The answer is the same, greedy or
//! not; only how many steps it takes depends on how good the proposals are.

mod lookup;

use crate::error::{EngineError, Result};
pub(crate) use lookup::PromptLookup;
use std::{fmt, str::FromStr};

/// Where proposals come from, and how many at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Speculation {
    /// Prompt lookup: what followed the request's last tokens where they stood before, in its prompt or its answer. Costs no
    /// memory but for the logits. Pays where answers repeat what was said: code that is edited, quotes, lists, forms.
    Ngram {
        /// The most tokens proposed at a time; the number adapts to how many are right.
        tokens: usize,
    },
}

impl Speculation {
    /// Tokens proposed at a time unless it is said otherwise. With the one before them they fill a step of 8.
    pub const DEFAULT_TOKENS: usize = 7;

    /// The most that may be asked for.
    pub const MOST_TOKENS: usize = 63;

    /// The most tokens proposed for a request at a time.
    pub fn tokens(self) -> usize {
        let Self::Ngram { tokens } = self;
        tokens
    }

    /// Checks the number of tokens.
    ///
    /// # Errors
    /// If it is out of range.
    pub(crate) fn validate(self) -> Result<()> {
        if (1..=Self::MOST_TOKENS).contains(&self.tokens()) {
            return Ok(());
        }
        let rule = format!("must propose from 1 to {} tokens", Self::MOST_TOKENS);
        Err(EngineError::option("speculate", self, rule))
    }
}

impl fmt::Display for Speculation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Ngram { tokens } = self;
        write!(formatter, "ngram:{tokens}")
    }
}

impl From<Speculation> for String {
    fn from(speculation: Speculation) -> Self {
        speculation.to_string()
    }
}

impl FromStr for Speculation {
    type Err = String;

    /// Reads `ngram` or `ngram:K`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, tokens) = match text.split_once(':') {
            Some((name, tokens)) => (name, tokens.parse().ok()),
            None => (text, Some(Self::DEFAULT_TOKENS)),
        };
        let read = tokens.filter(|_| name == "ngram").map(|tokens| Self::Ngram { tokens });
        let read = read.filter(|read| read.validate().is_ok());
        read.ok_or_else(|| format!("must be `ngram` or `ngram:K`, with K from 1 to {}", Self::MOST_TOKENS))
    }
}

impl TryFrom<String> for Speculation {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_as_it_is_written() {
        for (text, tokens) in [("ngram", 7), ("ngram:1", 1), ("ngram:63", 63)] {
            let read: Speculation = text.parse().unwrap();
            assert_eq!(read, Speculation::Ngram { tokens });
            assert_eq!(read.to_string().parse(), Ok(read));
        }
        for text in ["", "ngram:", "ngram:0", "ngram:64", "ngram:x", "ngram:-1", "draft:3", "NGRAM"] {
            let error = text.parse::<Speculation>().unwrap_err();
            assert!(error.contains("`ngram:K`"), "{text}: {error}");
        }
    }
}
