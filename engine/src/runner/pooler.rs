//! Pools the hidden states of a text into an embedding.
//!
//! The hidden states are those after the final norm, the input of a decoder's LM head. The embedding is their mean over all
//! tokens, or the hidden state of the first or last token, scaled to length 1 unless the request says otherwise. Sums are in f64,
//! in the order of the tokens. The scores of a text are returned unchanged.

use crate::{
    error::{EngineError, Result},
    request::Pooling,
};
use std::ops::Range;

/// Pools the hidden states of one text, chunk by chunk.
#[derive(Debug)]
pub(crate) struct Pooler {
    pooling: Pooling,
    keep_length: bool,
    /// The next token to pool.
    next: usize,
    /// The end of the tokens to pool.
    end: usize,
    sum: Vec<f64>,
}

impl Pooler {
    /// A pooler for a text of this many tokens.
    pub(crate) fn new(tokens: usize, pooling: Pooling, keep_length: bool) -> Self {
        let (next, end) = match pooling {
            Pooling::Mean => (0, tokens),
            Pooling::Last => (tokens.saturating_sub(1), tokens),
            Pooling::First | Pooling::Scores => (0, 1),
        };
        Self { pooling, keep_length, next, end, sum: Vec::new() }
    }

    /// Whether it takes the scores of the text instead of hidden states.
    pub(crate) fn takes_scores(&self) -> bool {
        self.pooling == Pooling::Scores
    }

    /// The tokens of a range whose hidden states are needed.
    pub(crate) fn needed(&self, tokens: Range<usize>) -> Range<usize> {
        let first = match self.pooling {
            Pooling::Last => self.end - 1,
            Pooling::Mean | Pooling::First | Pooling::Scores => 0,
        };
        let [start, end] = [first, self.end].map(|index| index.clamp(tokens.start, tokens.end));
        start..end
    }

    /// Adds the hidden states of the tokens from `first` on, `width` features each. Tokens that were recomputed after a pre-emption
    /// count once.
    pub(crate) fn add(&mut self, first: usize, states: &[f32], width: usize) {
        self.sum.resize(width, 0.0);
        for (token, state) in (first..).zip(states.chunks_exact(width)) {
            if token == self.next {
                self.sum.iter_mut().zip(state).for_each(|(sum, value)| *sum += f64::from(*value));
                self.next += 1;
            }
        }
    }

    /// The embedding, once all tokens have been added.
    ///
    /// # Errors
    /// If the hidden states are not finite.
    pub(crate) fn embedding(&self) -> Option<Result<Vec<f32>>> {
        if self.next < self.end {
            return None;
        }
        let length = self.sum.iter().map(|value| value * value).sum::<f64>().sqrt();
        if !length.is_finite() {
            return Some(Err(EngineError::NoEmbedding));
        }
        let scale = match self.keep_length || self.takes_scores() {
            true if self.pooling == Pooling::Mean => 1.0 / self.end as f64,
            true => 1.0,
            // A vector of zeros has no direction and stays as it is.
            false if length == 0.0 => 0.0,
            false => 1.0 / length,
        };
        Some(Ok(self.sum.iter().map(|value| (value * scale) as f32).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn embedding(pooler: &Pooler) -> Vec<f32> {
        pooler.embedding().expect("all tokens were added").expect("the states are finite")
    }

    #[test]
    fn the_mean_counts_every_token_once() {
        let mut pooler = Pooler::new(3, Pooling::Mean, false);
        assert_eq!((pooler.needed(0..2), pooler.needed(2..3)), (0..2, 2..3));
        pooler.add(0, &[1.0, 0.0, 2.0, 1.0], 2);
        assert!(pooler.embedding().is_none());
        // The same tokens once more, after a pre-emption.
        pooler.add(0, &[1.0, 0.0, 2.0, 1.0], 2);
        pooler.add(2, &[0.0, 3.0], 2);
        assert_eq!(embedding(&pooler), [0.6, 0.8]);
    }

    #[test]
    fn only_the_last_token_is_needed_for_last_token_pooling() {
        let mut pooler = Pooler::new(5, Pooling::Last, false);
        assert!(pooler.needed(0..4).is_empty());
        assert_eq!((pooler.needed(2..5), pooler.needed(4..5)), (4..5, 4..5));
        pooler.add(4, &[0.0, -2.0], 2);
        assert_eq!(embedding(&pooler), [0.0, -1.0]);
    }

    #[test]
    fn the_first_token_and_the_scores_are_taken_from_the_first_chunk() {
        let mut pooler = Pooler::new(5, Pooling::First, true);
        assert_eq!((pooler.needed(0..4), pooler.needed(4..5)), (0..1, 4..4));
        pooler.add(0, &[3.0, -4.0], 2);
        assert_eq!(embedding(&pooler), [3.0, -4.0]);
        let mut pooler = Pooler::new(2, Pooling::Mean, true);
        pooler.add(0, &[3.0, -4.0, 1.0, 2.0], 2);
        assert_eq!(embedding(&pooler), [2.0, -1.0]);
        let mut pooler = Pooler::new(5, Pooling::Scores, false);
        assert!(pooler.takes_scores());
        pooler.add(0, &[0.5], 1);
        assert_eq!(embedding(&pooler), [0.5]);
    }

    #[test]
    fn zeros_stay_zeros_and_nan_is_an_error() {
        let mut pooler = Pooler::new(1, Pooling::Mean, false);
        pooler.add(0, &[0.0, 0.0], 2);
        assert_eq!(embedding(&pooler), [0.0, 0.0]);
        let mut pooler = Pooler::new(1, Pooling::Mean, false);
        pooler.add(0, &[f32::NAN, 0.0], 2);
        assert!(matches!(pooler.embedding(), Some(Err(EngineError::NoEmbedding))));
    }
}
