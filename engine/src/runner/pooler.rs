//! Texts as vectors.
//!
//! A text's vector is made of the hidden states of the last layer, after the final norm (what the head would turn into
//! logits): their mean over all tokens, or that of the last token, scaled to length 1. Sums are in f64, in the order of the tokens.

use crate::error::{EngineError, Result};
use std::ops::Range;

/// What stands for a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The mean over its tokens.
    #[default]
    Mean,
    /// Its last token.
    Last,
}

/// A text to turn into a vector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EmbeddingRequest {
    /// The text's tokens; at least one.
    pub tokens: Vec<u32>,
    /// What stands for the text.
    pub pooling: Pooling,
    /// Requests of a higher priority run before, and in place of, those of a lower one.
    pub priority: i32,
}

/// Sums up the hidden states of a text as they come.
#[derive(Debug)]
pub(crate) struct Pooler {
    tokens: usize,
    pooling: Pooling,
    /// The first token that has not been pooled.
    next: usize,
    sum: Vec<f64>,
}

impl Pooler {
    /// For a text of so many tokens.
    pub(crate) fn new(tokens: usize, pooling: Pooling) -> Self {
        let next = match pooling {
            Pooling::Mean => 0,
            Pooling::Last => tokens.saturating_sub(1),
        };
        Self { tokens, pooling, next, sum: Vec::new() }
    }

    /// Those of some tokens whose hidden states are needed.
    pub(crate) fn wanted(&self, tokens: Range<usize>) -> Range<usize> {
        match self.pooling {
            Pooling::Mean => tokens,
            Pooling::Last => (self.tokens - 1).clamp(tokens.start, tokens.end)..tokens.end,
        }
    }

    /// Takes the hidden states of the tokens from `first` on, `width` features each. Tokens that were computed again, because
    /// the request had to yield its pages, count once.
    pub(crate) fn take(&mut self, first: usize, states: &[f32], width: usize) {
        self.sum.resize(width, 0.0);
        for (token, state) in (first..).zip(states.chunks_exact(width)) {
            if token == self.next {
                self.sum.iter_mut().zip(state).for_each(|(sum, value)| *sum += f64::from(*value));
                self.next += 1;
            }
        }
    }

    /// The vector, once all tokens have been taken.
    ///
    /// # Errors
    /// If the hidden states are not numbers.
    pub(crate) fn vector(&self) -> Option<Result<Vec<f32>>> {
        if self.next < self.tokens {
            return None;
        }
        let length = self.sum.iter().map(|value| value * value).sum::<f64>().sqrt();
        if !length.is_finite() {
            return Some(Err(EngineError::NoEmbedding));
        }
        // What has no direction stays what it is.
        let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
        Some(Ok(self.sum.iter().map(|value| (value * scale) as f32).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(pooler: &Pooler) -> Vec<f32> {
        pooler.vector().expect("all tokens are there").expect("they are numbers")
    }

    #[test]
    fn the_mean_is_over_all_tokens_once_each() {
        let mut pooler = Pooler::new(3, Pooling::Mean);
        assert_eq!((pooler.wanted(0..2), pooler.wanted(2..3)), (0..2, 2..3));
        pooler.take(0, &[1.0, 0.0, 2.0, 1.0], 2);
        assert!(pooler.vector().is_none());
        // Computed again, all of it.
        pooler.take(0, &[1.0, 0.0, 2.0, 1.0], 2);
        pooler.take(2, &[0.0, 3.0], 2);
        assert_eq!(vector(&pooler), [0.6, 0.8]);
    }

    #[test]
    fn the_last_token_is_the_only_one_that_is_wanted() {
        let mut pooler = Pooler::new(5, Pooling::Last);
        assert!(pooler.wanted(0..4).is_empty());
        assert_eq!((pooler.wanted(2..5), pooler.wanted(4..5)), (4..5, 4..5));
        pooler.take(4, &[0.0, -2.0], 2);
        assert_eq!(vector(&pooler), [0.0, -1.0]);
    }

    #[test]
    fn what_has_no_length_is_none_or_an_error() {
        let mut pooler = Pooler::new(1, Pooling::Mean);
        pooler.take(0, &[0.0, 0.0], 2);
        assert_eq!(vector(&pooler), [0.0, 0.0]);
        let mut pooler = Pooler::new(1, Pooling::Mean);
        pooler.take(0, &[f32::NAN, 0.0], 2);
        assert!(matches!(pooler.vector(), Some(Err(EngineError::NoEmbedding))));
    }
}
