//! Speculation: tokens are proposed cheaply, and the model checks several in one step.
//!
//! A step that brings what was proposed behind a request's last token samples at each of these places. The draw at a place
//! depends on the tokens before it, on seed and position alone, so as long as each draw is what was proposed, the next is
//! the one that would have come anyway. What follows the first that differs is dropped. The answer is the same, greedy or
//! not; only how many steps it takes depends on how good the proposals are.

mod draft_length;
mod draft_model;
mod prompt_lookup;

use crate::error::{EngineError, Result};
use draft_length::DraftLength;
pub(crate) use draft_model::Drafter;
use prompt_lookup::PromptLookup;
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
    /// A second, smaller model with the same vocabulary, which [`EnginePlan::with_draft`](crate::EnginePlan::with_draft) takes.
    /// It has a KV cache of its own, as long as that of the model. Pays where it is right often, and much faster.
    Draft {
        /// The most tokens proposed at a time; the number adapts to how many are right, and to what a step has left for each
        /// request.
        tokens: usize,
    },
}

impl Speculation {
    /// Tokens that prompt lookup proposes at a time unless it is said otherwise. With the one before them they fill a step of 8.
    pub const NGRAM_TOKENS: usize = 7;

    /// Tokens that a second model proposes at a time unless it is said otherwise: each takes a step of that model.
    pub const DRAFT_TOKENS: usize = 4;

    /// The most that may be asked for.
    pub const MOST_TOKENS: usize = 63;

    /// The most tokens proposed for a request at a time.
    pub fn tokens(self) -> usize {
        match self {
            Self::Ngram { tokens } | Self::Draft { tokens } => tokens,
        }
    }

    /// What proposes for a new request.
    pub(crate) fn proposer(self) -> Proposer {
        match self {
            Self::Ngram { tokens } => Proposer::Lookup(PromptLookup::new(tokens)),
            Self::Draft { tokens } => Proposer::Draft(DraftLength::new(tokens)),
        }
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

/// What proposes tokens for a request.
#[derive(Debug)]
pub(crate) enum Proposer {
    /// Its own prompt and answer.
    Lookup(PromptLookup),
    /// The engine's second model, which is asked for so many.
    Draft(DraftLength),
}

impl fmt::Display for Speculation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Ngram { .. } => "ngram",
            Self::Draft { .. } => "draft",
        };
        write!(formatter, "{name}:{}", self.tokens())
    }
}

impl From<Speculation> for String {
    fn from(speculation: Speculation) -> Self {
        speculation.to_string()
    }
}

impl FromStr for Speculation {
    type Err = String;

    /// Reads `ngram`, `ngram:K`, `draft` or `draft:K`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, tokens) = match text.split_once(':') {
            Some((name, tokens)) => (name, Some(tokens)),
            None => (text, None),
        };
        let number = |default| tokens.map_or(Ok(default), str::parse);
        let read = match name {
            "ngram" => number(Self::NGRAM_TOKENS).ok().map(|tokens| Self::Ngram { tokens }),
            "draft" => number(Self::DRAFT_TOKENS).ok().map(|tokens| Self::Draft { tokens }),
            _ => None,
        };
        let forms = "must be `ngram`, `ngram:K`, `draft` or `draft:K`";
        read.filter(|read| read.validate().is_ok())
            .ok_or_else(|| format!("{forms}, with K from 1 to {}", Self::MOST_TOKENS))
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
        let (ngram, draft) = (|tokens| Speculation::Ngram { tokens }, |tokens| Speculation::Draft { tokens });
        let texts = [
            ("ngram", ngram(7)),
            ("ngram:1", ngram(1)),
            ("ngram:63", ngram(63)),
            ("draft", draft(4)),
            ("draft:2", draft(2)),
        ];
        for (text, speculation) in texts {
            let read: Speculation = text.parse().unwrap();
            assert_eq!(read, speculation);
            assert_eq!(read.to_string().parse(), Ok(read));
        }
        for text in
            ["", "ngram:", "ngram:0", "ngram:64", "ngram:x", "ngram:-1", "draft:0", "draft:a/b", "NGRAM"]
        {
            let error = text.parse::<Speculation>().unwrap_err();
            assert!(error.contains("`ngram:K`") && error.contains("`draft:K`"), "{text}: {error}");
        }
    }
}
