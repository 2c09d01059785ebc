//! The expected number of experts of a layer that a step reads.

/// The experts whose matrices are stored in one weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Experts {
    pub(crate) count: usize,
    /// The number of experts of a token.
    pub(crate) slots: usize,
}

impl Experts {
    /// The expected share of the experts that are chosen by at least one of `tokens` tokens, if routers choose all experts
    /// equally often.
    pub(crate) fn expected_share(self, tokens: usize) -> f64 {
        let count = self.count.max(1) as f64;
        1.0 - (1.0 - (self.slots as f64 / count).min(1.0)).powf(tokens as f64)
    }
}
