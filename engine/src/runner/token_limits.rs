//! Requests that may not sample every token: a bias, a constraint, an end that may not come yet. A step with such a request
//! samples in a segment of its own, for all its rows.

use crate::engine::{Engine, Running};
use crate::{
    error::{EngineError, Result},
    request::ConstraintError,
    schedule::{Key, Sequence},
};
use dsrun_core::device::BufferSlice;

/// Tokens of a word of a mask.
const BITS: usize = 32;

impl Running {
    /// Tokens that end it.
    fn ends<'a>(&'a self, model: &'a [u32]) -> impl Iterator<Item = u32> + 'a {
        let model = if self.ignore_end { &[] } else { model };
        self.stop_ids.iter().chain(model).copied()
    }

    /// Whether a token ends it.
    pub(crate) fn ends_with(&self, token: u32, model: &[u32]) -> bool {
        self.stop_ids.contains(&token) || (!self.ignore_end && model.contains(&token))
    }
}

/// Whether the token that is sampled next, in the step that is planned, may not be one that ends the answer.
fn must_go_on(sequence: &Sequence<Running>) -> bool {
    sequence.generated() + sequence.unread <= sequence.item.min_tokens
}

impl Engine {
    /// Whether a step in which these requests sample needs the mask or the bias.
    pub(crate) fn is_limited(&self, requests: &[Key]) -> bool {
        let limited = |sequence: &Sequence<Running>| {
            let Running { bias, constraint, .. } = &sequence.item;
            !bias.is_empty() || constraint.is_some() || must_go_on(sequence)
        };
        requests.iter().filter_map(|key| self.scheduler.get(*key)).any(limited)
    }

    /// Makes the mask of a step: a row for each request that samples, in their order. A request whose constraint fails is ended;
    /// its row allows every token, and what comes of it is for nobody.
    pub(crate) fn make_mask(&mut self, requests: &[Key]) {
        let words = self.vocabulary.div_ceil(BITS);
        let mut mask = std::mem::take(&mut self.mask);
        mask.clear();
        mask.resize(requests.len() * words, u32::MAX);
        for (key, row) in requests.iter().zip(mask.chunks_exact_mut(words)) {
            if let Err((id, error)) = self.limit(*key, row) {
                row.fill(u32::MAX);
                self.fail(id, error);
            }
        }
        self.mask = mask;
    }

    /// Takes the tokens out of a row that a request may not sample.
    fn limit(&mut self, key: Key, row: &mut [u32]) -> Result<(), (crate::RequestId, EngineError)> {
        let stop_ids = &self.stop_ids;
        let Some(sequence) = self.scheduler.get_mut(key) else { return Ok(()) };
        let goes_on = must_go_on(sequence);
        let request = &mut sequence.item;
        if let Some(constraint) = &mut request.constraint {
            row.fill(0);
            constraint.allow(row).map_err(|error| (request.id, error.into()))?;
        }
        if goes_on {
            let place = |token: u32| (token as usize / BITS, 1 << (token as usize % BITS));
            let allowed =
                |token: &u32| row.get(place(*token).0).is_some_and(|word| word & place(*token).1 != 0);
            let ends: Vec<u32> = request.ends(stop_ids).filter(allowed).collect();
            ends.iter().map(|token| place(*token)).for_each(|(word, bit)| row[word] &= !bit);
            // Where the constraint has come to its end, there is nothing else.
            if row.iter().all(|word| *word == 0) {
                ends.iter().map(|token| place(*token)).for_each(|(word, bit)| row[word] |= bit);
            }
        }
        if row.iter().all(|word| *word == 0) {
            return Err((request.id, ConstraintError("it allows no token".into()).into()));
        }
        Ok(())
    }

    /// Brings the mask to the place a step reads it from.
    pub(crate) fn upload_mask(&mut self, place: &BufferSlice) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(&self.mask);
        Ok(self.stream.upload(bytes, &place.slice(0, bytes.len())?)?)
    }

    /// Sets the bias of a row of the request table for who has it now.
    pub(crate) fn set_bias(&mut self, slot: usize, key: Key) -> Result<()> {
        let Some(sequence) = self.scheduler.get(key) else { return Ok(()) };
        let bias = &sequence.item.bias;
        if bias.is_empty() && !self.biased[slot] {
            return Ok(());
        }
        let mut values = vec![0f32; self.vocabulary];
        for (token, value) in bias {
            values[*token as usize] = *value;
        }
        self.biased[slot] = !bias.is_empty();
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        let row = self.state("bias")?.slice(slot * bytes.len(), bytes.len())?;
        Ok(self.stream.upload(bytes, &row)?)
    }
}

/// The `count` largest logits as tokens with the logarithms of their probabilities, the largest first and the lower token first on
/// ties. `known` is a token with the logarithm of its probability.
pub(crate) fn likeliest(logits: &[f32], count: usize, known: (u32, f32)) -> Vec<(u32, f32)> {
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    for (token, logit) in (0u32..).zip(logits.iter().copied()) {
        let full = top.len() == count;
        if logit.is_nan() || (full && top.last().is_none_or(|(_, last)| logit <= *last)) {
            continue;
        }
        let place = top.partition_point(|(_, other)| *other >= logit);
        top.insert(place, (token, logit));
        top.truncate(count);
    }
    let (token, log_probability) = known;
    let normaliser = logits.get(token as usize).map_or(0.0, |logit| logit - log_probability);
    for (other, logit) in &mut top {
        // Of the known token to the last bit.
        *logit = if *other == token { log_probability } else { *logit - normaliser };
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likeliest_are_in_order_with_their_probabilities() {
        let logits = [1.0, f32::NAN, 4.0, 3.0, 4.0, f32::NEG_INFINITY];
        let normaliser = 0.5;
        let known = (3, 3.0 - normaliser);
        let expected = [(2, 3.5), (4, 3.5), (3, 2.5)];
        assert_eq!(likeliest(&logits, 3, known), expected);
        assert_eq!(likeliest(&logits, 1, known), expected[..1]);
        assert_eq!(likeliest(&logits, 0, known), []);
        assert_eq!(likeliest(&logits, 10, known).len(), 5);
    }
}
