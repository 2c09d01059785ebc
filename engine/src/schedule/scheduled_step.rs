//! A scheduled step: the sequences that take part, and the changes to make before it.

use super::sequence::SequenceKey;
use crate::kv_cache::PageMove;

/// A sequence's part in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScheduledSequence {
    /// The sequence.
    pub(crate) key: SequenceKey,
    /// Its tokens in the step, proposed ones included.
    pub(crate) tokens: usize,
    /// The index of the first of these tokens in the sequence; `None` if the only token is the one that the device sampled last,
    /// which the host may not know yet.
    pub(crate) from: Option<usize>,
    /// The number of trailing rows to sample from: 0, 1, or 1 plus the number of proposed tokens.
    pub(crate) samples: usize,
}

impl ScheduledSequence {
    /// The number of proposed tokens.
    pub(crate) fn proposed(&self) -> usize {
        self.samples.saturating_sub(1)
    }
}

/// A step, and the changes to make before it. Reused from step to step to avoid allocations.
#[derive(Debug, Default)]
pub(crate) struct ScheduledStep {
    /// The sequences that take part.
    pub(crate) sequences: Vec<ScheduledSequence>,
    /// The number of tokens of all sequences.
    pub(crate) tokens: usize,
    /// Sequences whose row of the request table must be written, with the number of their tokens in the KV cache before this
    /// step. If a sequence has several entries, the last one is valid; entries of sequences that no longer run are stale.
    pub(crate) placed: Vec<(SequenceKey, usize)>,
    /// Sequences that got new pages, with the index of the first new page. Entries of sequences that no longer run are stale.
    pub(crate) grown: Vec<(SequenceKey, usize)>,
    /// Pages to copy to and from the host before the step, in this order.
    pub(crate) moves: Vec<PageMove>,
}

impl ScheduledStep {
    pub(super) fn clear(&mut self) {
        let Self { sequences, tokens, placed, grown, moves } = self;
        sequences.clear();
        *tokens = 0;
        placed.clear();
        grown.clear();
        moves.clear();
    }
}
