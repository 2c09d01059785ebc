//! The option `speculate`: what proposes tokens, and how many at a time.

use crate::error::{EngineError, Result};
use std::{fmt, str::FromStr};

/// What proposes tokens, and how many at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Speculation {
    /// Prompt lookup: proposes the tokens that followed the request's last tokens earlier in its prompt or answer. Costs memory
    /// for the logits only. Pays where answers repeat earlier text: edited code, quotes, lists, forms.
    Ngram {
        /// The maximum number of tokens proposed at a time; the number adapts to how many are accepted.
        tokens: usize,
    },
    /// A draft model: a second, smaller model with the same vocabulary, see
    /// [`EnginePlan::with_draft`](crate::EnginePlan::with_draft). It has its own KV cache, as long as that of the model. Pays where
    /// its tokens are accepted often and its step is much shorter.
    Draft {
        /// The maximum number of tokens proposed at a time; the number adapts to how many are accepted, and to the room of a step
        /// for each request.
        tokens: usize,
    },
}

impl Speculation {
    /// Tokens that prompt lookup proposes at a time by default. With the token before them they fill a step of 8.
    pub const NGRAM_TOKENS: usize = 7;

    /// Tokens that a draft model proposes at a time by default: each takes a step of that model.
    pub const DRAFT_TOKENS: usize = 4;

    /// The maximum number of tokens that may be proposed at a time.
    pub const MAX_TOKENS: usize = 63;

    /// The maximum number of tokens proposed for a request at a time.
    pub fn tokens(self) -> usize {
        match self {
            Self::Ngram { tokens } | Self::Draft { tokens } => tokens,
        }
    }

    /// Checks the number of tokens.
    ///
    /// # Errors
    /// If it is out of range.
    pub(crate) fn validate(self) -> Result<()> {
        if (1..=Self::MAX_TOKENS).contains(&self.tokens()) {
            return Ok(());
        }
        let rule = format!("must propose from 1 to {} tokens", Self::MAX_TOKENS);
        Err(EngineError::option("speculate", self, rule))
    }
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
            .ok_or_else(|| format!("{forms}, with K from 1 to {}", Self::MAX_TOKENS))
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
    fn speculation_is_parsed_back_from_its_text() {
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
