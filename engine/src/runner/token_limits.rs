//! Token limits of requests: a logit bias, a constraint, or end tokens that are forbidden before `min_tokens`. A step with
//! such a request samples all its rows with the segment `sample_limited`.

use super::{RequestSequence, executor::Executor, requests::Requests};
use crate::{
    error::{ConstraintError, EngineError, Result},
    plan::StepState,
    request::RequestId,
    schedule::SequenceKey,
};

/// Tokens in a word of a mask.
const WORD_BITS: usize = 32;

/// The mask of a step, and the rows of the request table that have a bias.
#[derive(Debug)]
pub(super) struct TokenLimits {
    vocabulary: usize,
    /// Whether each row of the request table has a bias on the device.
    biased: Vec<bool>,
    /// The mask of the step being launched. Reused from step to step to avoid allocations.
    mask: Vec<u32>,
}

/// Whether the next token of a sequence must not be an end token.
fn must_continue(sequence: &RequestSequence) -> bool {
    sequence.generated() + sequence.unread <= sequence.item.min_tokens
}

impl TokenLimits {
    /// No limits, for a request table of `slots` rows.
    pub(super) fn new(slots: usize, vocabulary: usize) -> Self {
        Self { vocabulary, biased: vec![false; slots], mask: Vec::new() }
    }

    /// Whether a step that samples for these sequences needs the mask or the bias.
    pub(super) fn applies(&self, requests: &Requests, sequences: &[SequenceKey]) -> bool {
        let limited = |sequence: &RequestSequence| {
            let request = &sequence.item;
            !request.bias.is_empty() || request.constraint.is_some() || must_continue(sequence)
        };
        sequences.iter().filter_map(|key| requests.scheduler().get(*key)).any(limited)
    }

    /// Computes the mask of a step, with a row for each sequence. Returns the requests whose constraint failed: their rows allow
    /// every token, and the sampled token is discarded.
    pub(super) fn make_mask(
        &mut self,
        requests: &mut Requests,
        sequences: &[SequenceKey],
    ) -> Vec<(RequestId, EngineError)> {
        let words = self.vocabulary.div_ceil(WORD_BITS);
        self.mask.clear();
        self.mask.resize(sequences.len() * words, u32::MAX);
        let mut failures = Vec::new();
        for (key, row) in sequences.iter().zip(self.mask.chunks_exact_mut(words)) {
            if let Err(failure) = limit_row(requests, *key, row) {
                row.fill(u32::MAX);
                failures.push(failure);
            }
        }
        failures
    }

    /// The mask of the step that is launched.
    pub(super) fn mask(&self) -> &[u32] {
        &self.mask
    }

    /// Sets the bias of a row of the request table.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn set_bias(
        &mut self,
        executor: &mut Executor,
        slot: usize,
        bias: &[(u32, f32)],
    ) -> Result<()> {
        if bias.is_empty() && !self.biased[slot] {
            return Ok(());
        }
        let mut values = vec![0f32; self.vocabulary];
        for (token, value) in bias {
            values[*token as usize] = *value;
        }
        self.biased[slot] = !bias.is_empty();
        executor.upload_state_row(StepState::Bias, slot, bytemuck::cast_slice(&values))
    }
}

/// Clears the bits of tokens that a request may not sample in its row of the mask.
fn limit_row(
    requests: &mut Requests,
    key: SequenceKey,
    row: &mut [u32],
) -> Result<(), (RequestId, EngineError)> {
    let (scheduler, stop_ids) = requests.scheduler_and_stop_ids();
    let Some(sequence) = scheduler.get_mut(key) else { return Ok(()) };
    let must_continue = must_continue(sequence);
    let request = &mut sequence.item;
    if let Some(constraint) = &mut request.constraint {
        row.fill(0);
        constraint.allow(row).map_err(|error| (request.id, error.into()))?;
    }
    if must_continue {
        let place = |token: u32| (token as usize / WORD_BITS, 1 << (token as usize % WORD_BITS));
        let allowed = |token: &u32| row.get(place(*token).0).is_some_and(|word| word & place(*token).1 != 0);
        let ends: Vec<u32> = request.end_tokens(stop_ids).filter(allowed).collect();
        ends.iter().map(|token| place(*token)).for_each(|(word, bit)| row[word] &= !bit);
        // A complete constraint allows only end tokens, so these are not forbidden.
        if row.iter().all(|word| *word == 0) {
            ends.iter().map(|token| place(*token)).for_each(|(word, bit)| row[word] |= bit);
        }
    }
    if row.iter().all(|word| *word == 0) {
        return Err((request.id, ConstraintError("it allows no token".into()).into()));
    }
    Ok(())
}
