//! Pools the hidden states of a text into an embedding.
//!
//! The hidden states are those after the final norm, the input of a decoder's LM head. The embedding is their mean over all
//! tokens, or the hidden state of the first or last token, scaled to length 1 unless the request says otherwise. Sums are in f64,
//! in the order of the tokens. The scores of a text are returned unchanged.

use crate::{
    error::{EngineError, Result},
    request::Pooling,
};
use dsrun_core::{DType, WeightFormat};
use rayon::prelude::*;
use std::ops::Range;

/// Features that are added up together.
const BLOCK: usize = 64;
/// Values that a thread adds up at least: that takes about as long as waking it.
pub(super) const THREAD_VALUES: usize = 1 << 17;

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

    /// Adds the hidden states of the tokens from `first` on, rows of `width` elements. Tokens that were recomputed after a pre-emption
    /// count once. Threads add up the features of a long text side by side.
    ///
    /// # Errors
    /// If the bytes are no rows of this width.
    pub(crate) fn add(&mut self, first: usize, states: &[u8], dtype: DType, width: usize) -> Result<()> {
        self.sum.resize(width, 0.0);
        let (row_bytes, format) = (width * dtype.bytes(), WeightFormat::Dense(dtype));
        let rows = states.chunks_exact(row_bytes.max(1));
        let new = rows.skip(self.next.saturating_sub(first));
        if first > self.next || new.len() == 0 {
            return Ok(());
        }
        let add = |(block, sums): (usize, &mut [f64])| -> Result<()> {
            let mut values = [0.0; BLOCK];
            let values = &mut values[..sums.len()];
            for row in new.clone() {
                let part = &row[block * BLOCK * dtype.bytes()..][..sums.len() * dtype.bytes()];
                format.decode_row(part, values)?;
                sums.iter_mut().zip(&*values).for_each(|(sum, value)| *sum += f64::from(*value));
            }
            Ok(())
        };
        let blocks = THREAD_VALUES.div_ceil(BLOCK * new.len());
        if width <= BLOCK * blocks {
            self.sum.chunks_mut(BLOCK).enumerate().try_for_each(add)?;
        } else {
            self.sum.par_chunks_mut(BLOCK).enumerate().with_min_len(blocks).try_for_each(add)?;
        }
        self.next += new.len();
        Ok(())
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

    fn add(pooler: &mut Pooler, first: usize, states: &[f32], width: usize) {
        pooler.add(first, bytemuck::cast_slice(states), DType::F32, width).unwrap();
    }

    fn embedding(pooler: &Pooler) -> Vec<f32> {
        pooler.embedding().expect("all tokens were added").expect("the states are finite")
    }

    #[test]
    fn the_mean_counts_every_token_once() {
        let mut pooler = Pooler::new(3, Pooling::Mean, false);
        assert_eq!((pooler.needed(0..2), pooler.needed(2..3)), (0..2, 2..3));
        add(&mut pooler, 0, &[1.0, 0.0, 2.0, 1.0], 2);
        assert!(pooler.embedding().is_none());
        // The same tokens once more, after a pre-emption.
        add(&mut pooler, 0, &[1.0, 0.0, 2.0, 1.0], 2);
        add(&mut pooler, 2, &[0.0, 3.0], 2);
        assert_eq!(embedding(&pooler), [0.6, 0.8]);
    }

    #[test]
    fn only_the_last_token_is_needed_for_last_token_pooling() {
        let mut pooler = Pooler::new(5, Pooling::Last, false);
        assert!(pooler.needed(0..4).is_empty());
        assert_eq!((pooler.needed(2..5), pooler.needed(4..5)), (4..5, 4..5));
        add(&mut pooler, 4, &[0.0, -2.0], 2);
        assert_eq!(embedding(&pooler), [0.0, -1.0]);
    }

    #[test]
    fn the_first_token_and_the_scores_are_taken_from_the_first_chunk() {
        let mut pooler = Pooler::new(5, Pooling::First, true);
        assert_eq!((pooler.needed(0..4), pooler.needed(4..5)), (0..1, 4..4));
        add(&mut pooler, 0, &[3.0, -4.0], 2);
        assert_eq!(embedding(&pooler), [3.0, -4.0]);
        let mut pooler = Pooler::new(2, Pooling::Mean, true);
        add(&mut pooler, 0, &[3.0, -4.0, 1.0, 2.0], 2);
        assert_eq!(embedding(&pooler), [2.0, -1.0]);
        let mut pooler = Pooler::new(5, Pooling::Scores, false);
        assert!(pooler.takes_scores());
        add(&mut pooler, 0, &[0.5], 1);
        assert_eq!(embedding(&pooler), [0.5]);
    }

    #[test]
    fn threads_add_up_a_long_text_in_the_order_of_its_tokens() {
        let (tokens, width) = (2 * THREAD_VALUES / BLOCK, 3 * BLOCK + 5);
        let states: Vec<f32> = (0..tokens * width).map(|index| (index as f32 * 0.37).sin() + 1.0).collect();
        let mut pooler = Pooler::new(tokens, Pooling::Mean, true);
        // A part, and all of it again after a pre-emption.
        add(&mut pooler, 0, &states[..3 * width], width);
        add(&mut pooler, 0, &states, width);
        let mean = |feature: usize| {
            let sum =
                states.iter().skip(feature).step_by(width).fold(0.0, |sum, state| sum + f64::from(*state));
            (sum * (1.0 / tokens as f64)) as f32
        };
        assert_eq!(embedding(&pooler), (0..width).map(mean).collect::<Vec<f32>>());
    }

    #[test]
    fn zeros_stay_zeros_and_nan_is_an_error() {
        let mut pooler = Pooler::new(1, Pooling::Mean, false);
        add(&mut pooler, 0, &[0.0, 0.0], 2);
        assert_eq!(embedding(&pooler), [0.0, 0.0]);
        let mut pooler = Pooler::new(1, Pooling::Mean, false);
        add(&mut pooler, 0, &[f32::NAN, 0.0], 2);
        assert!(matches!(pooler.embedding(), Some(Err(EngineError::NoEmbedding))));
    }
}
