//! A scheduled step: the sequences that take part, and the changes to make before it.

use super::SequenceKey;

/// A sequence's part in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScheduledSequence {
    /// The sequence.
    pub(crate) key: SequenceKey,
    /// Its tokens in the step, proposed ones included.
    pub(crate) tokens: usize,
    /// The index of the first of these tokens among those that the host knows; `None` if the step's only token of the sequence is
    /// the one that the device sampled last.
    pub(crate) from: Option<usize>,
    /// The number of its last rows that a token is sampled from: 0, 1, or 1 and those of all proposed tokens.
    pub(crate) samples: usize,
}

impl ScheduledSequence {
    /// The number of proposed tokens.
    pub(crate) fn proposed(&self) -> usize {
        self.samples.saturating_sub(1)
    }
}

/// A step, and the changes to make before it. Kept from step to step for its memory.
#[derive(Debug, Default)]
pub(crate) struct ScheduledStep {
    /// The sequences that take part.
    pub(crate) sequences: Vec<ScheduledSequence>,
    /// The number of tokens of all sequences.
    pub(crate) tokens: usize,
    /// Sequences whose row of the request table is new or was reset, and their tokens in the cache before this step. The last
    /// entry of a sequence counts; a sequence that does not run any more was pre-empted meanwhile.
    pub(crate) placed: Vec<(SequenceKey, usize)>,
    /// Sequences that were given pages, and the index of the first new page. They may have been pre-empted meanwhile too.
    pub(crate) grown: Vec<(SequenceKey, usize)>,
    /// Pages to copy to host memory, before anything else.
    pub(crate) swap_out: Vec<(i32, u32)>,
    /// Pages to copy back from host memory, after that.
    pub(crate) swap_in: Vec<(u32, i32)>,
}

impl ScheduledStep {
    pub(super) fn clear(&mut self) {
        let Self { sequences, tokens, placed, grown, swap_out, swap_in } = self;
        sequences.clear();
        *tokens = 0;
        placed.clear();
        grown.clear();
        swap_out.clear();
        swap_in.clear();
    }
}
