//! What a step consists of.

use super::Key;

/// A sequence's part in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Whose it is.
    pub(crate) key: Key,
    /// Tokens it brings, what is proposed included.
    pub(crate) tokens: usize,
    /// Which of the tokens that the host knows they begin with; `None` if it is the one that the device sampled last.
    pub(crate) from: Option<usize>,
    /// How many of its last rows a token is sampled from: none, the last, or that and those of all tokens proposed behind it.
    pub(crate) samples: usize,
}

impl Part {
    /// Tokens of it that are proposed.
    pub(crate) fn proposed(&self) -> usize {
        self.samples.saturating_sub(1)
    }
}

/// A step, and what has to be done before it. Kept from step to step for its memory.
#[derive(Debug, Default)]
pub(crate) struct StepPlan {
    /// What it consists of.
    pub(crate) parts: Vec<Part>,
    /// Tokens of all parts.
    pub(crate) tokens: usize,
    /// Sequences whose place in the request table, or whose beginning, is new, and how many tokens they have before this
    /// step. The last mention of a sequence counts; one that does not run any more was pre-empted meanwhile.
    pub(crate) placed: Vec<(Key, usize)>,
    /// Sequences that were given pages, and from which on. They may not run any more either.
    pub(crate) grown: Vec<(Key, usize)>,
    /// Pages to copy to pages of host memory, before anything else.
    pub(crate) swap_out: Vec<(i32, u32)>,
    /// Pages of host memory to copy to pages, after that.
    pub(crate) swap_in: Vec<(u32, i32)>,
}

impl StepPlan {
    pub(super) fn clear(&mut self) {
        let Self { parts, tokens, placed, grown, swap_out, swap_in } = self;
        parts.clear();
        *tokens = 0;
        placed.clear();
        grown.clear();
        swap_out.clear();
        swap_in.clear();
    }
}
