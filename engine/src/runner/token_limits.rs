//! Token limits of requests: a logit bias, a constraint, or end tokens that are forbidden before `min_tokens`. A step with
//! such a request samples all its rows with the segment `sample_limited`.

use super::{RequestSequence, executor::Executor, requests::Requests};
use crate::{
    error::{ConstraintError, EngineError, Result},
    plan::StepState,
    request::{Constraint, RequestId},
    schedule::SequenceKey,
};
use rayon::prelude::*;

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
    ///
    /// A constraint may take a millisecond, so those of several requests run on several threads.
    pub(super) fn make_mask(
        &mut self,
        requests: &mut Requests,
        sequences: &[SequenceKey],
    ) -> Vec<(RequestId, EngineError)> {
        let words = self.vocabulary.div_ceil(WORD_BITS);
        self.mask.clear();
        self.mask.resize(sequences.len() * words, u32::MAX);
        let rows = sequences.iter().zip(self.mask.chunks_exact_mut(words));
        let mut limits: Vec<RowLimits<'_>> =
            rows.filter_map(|(key, row)| RowLimits::take(requests, *key, row)).collect();
        match limits.iter().filter(|limits| limits.constraint.is_some()).count() {
            ..=1 => limits.iter_mut().for_each(RowLimits::apply),
            _ => limits.par_iter_mut().for_each(RowLimits::apply),
        }
        limits.into_iter().filter_map(|limits| limits.give_back(requests)).collect()
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

/// What limits the next token of a sequence, taken out of its request while a mask is computed.
struct RowLimits<'a> {
    key: SequenceKey,
    request: RequestId,
    constraint: Option<Box<dyn Constraint>>,
    /// The end tokens, if the next token must not be one of them.
    forbidden_ends: Vec<u32>,
    /// The row of the mask.
    row: &'a mut [u32],
    outcome: Result<(), EngineError>,
}

impl<'a> RowLimits<'a> {
    /// The limits of a sequence; `None` if it is gone, or has none.
    fn take(requests: &mut Requests, key: SequenceKey, row: &'a mut [u32]) -> Option<Self> {
        let (scheduler, stop_ids) = requests.scheduler_and_stop_ids();
        let sequence = scheduler.get_mut(key)?;
        let must_continue = must_continue(sequence);
        let request = &mut sequence.item;
        let forbidden_ends = if must_continue { request.end_tokens(stop_ids).collect() } else { Vec::new() };
        let constraint = request.constraint.take();
        let limited = constraint.is_some() || !forbidden_ends.is_empty();
        limited.then_some(Self { key, request: request.id, constraint, forbidden_ends, row, outcome: Ok(()) })
    }

    /// Clears the bits of tokens that the request may not sample.
    fn apply(&mut self) {
        self.outcome = self.limit();
        if self.outcome.is_err() {
            self.row.fill(u32::MAX);
        }
    }

    fn limit(&mut self) -> Result<(), EngineError> {
        let row = &mut *self.row;
        if let Some(constraint) = &mut self.constraint {
            row.fill(0);
            constraint.allow(row)?;
        }
        let place = |token: u32| (token as usize / WORD_BITS, 1 << (token as usize % WORD_BITS));
        let allowed = |token: &u32| row.get(place(*token).0).is_some_and(|word| word & place(*token).1 != 0);
        let ends: Vec<u32> = self.forbidden_ends.iter().copied().filter(allowed).collect();
        ends.iter().map(|token| place(*token)).for_each(|(word, bit)| row[word] &= !bit);
        if row.iter().any(|word| *word != 0) {
            return Ok(());
        }
        // A complete constraint allows only end tokens, so these are not forbidden.
        ends.iter().map(|token| place(*token)).for_each(|(word, bit)| row[word] |= bit);
        match ends.is_empty() {
            true => Err(ConstraintError("it allows no token".into()).into()),
            false => Ok(()),
        }
    }

    /// Returns the constraint to its request, and why it failed, if it did.
    fn give_back(self, requests: &mut Requests) -> Option<(RequestId, EngineError)> {
        let (scheduler, _) = requests.scheduler_and_stop_ids();
        if let Some(sequence) = scheduler.get_mut(self.key) {
            sequence.item.constraint = self.constraint;
        }
        self.outcome.err().map(|error| (self.request, error))
    }
}
