//! Teacher-forced logits: the logits after each token of a given text.

use crate::{
    engine::Engine,
    error::Result,
    plan::StepOutput,
    runner::{Runner, STEP_TIMEOUT, StepInputs, as_i32},
};

/// The number of output rows in a scoring step.
const SCORE_ROWS: usize = 16;

/// The score of a sequence of tokens.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Score {
    /// The scored tokens.
    pub tokens: Vec<u32>,
    /// The mean negative log-likelihood in nats of the tokens after the first, each given those before it; `None` for a single
    /// token.
    pub mean_nll: Option<f64>,
    /// The positions that were asked for.
    pub positions: Vec<ScoredPosition>,
}

/// The largest logits after one token.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ScoredPosition {
    /// The position of the token, from 0.
    pub index: usize,
    /// The largest logits, largest first, as token and logit.
    pub top: Vec<(u32, f32)>,
}

impl Score {
    /// Scores `tokens`. Keeps the `top` largest logits of each position for which `wanted` is true.
    ///
    /// # Errors
    /// Same as [`Engine::score`].
    pub fn of(
        engine: &mut Engine,
        tokens: &[u32],
        top: usize,
        wanted: &dyn Fn(usize) -> bool,
    ) -> Result<Self> {
        let mut positions = Vec::new();
        let mut sum = 0.0;
        engine.score(tokens, &mut |index, logits| {
            if let Some(next) = tokens.get(index + 1) {
                sum -= log_probability(logits, *next);
            }
            if wanted(index) {
                positions.push(ScoredPosition { index, top: largest(logits, top) });
            }
        })?;
        let scored = tokens.len() - 1;
        let mean_nll = (scored > 0).then(|| sum / scored as f64);
        Ok(Self { tokens: tokens.to_vec(), mean_nll, positions })
    }
}

impl Engine {
    /// Calls `each(position, logits)` with the logits after each token of a sequence, given the tokens before it, in order.
    ///
    /// # Errors
    /// Same as [`Self::submit`] for the tokens; if requests are running; if the device failed.
    pub fn score(&mut self, tokens: &[u32], each: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        let runner = self.runner_mut();
        runner.limits().check_prompt(tokens)?;
        runner.with_pages(tokens.len(), |runner, pages| score(runner, pages, tokens, each))
    }
}

fn score(
    runner: &mut Runner,
    pages: &[i32],
    tokens: &[u32],
    each: &mut dyn FnMut(usize, &[f32]),
) -> Result<()> {
    let tokens: Vec<i32> = as_i32(tokens).collect();
    let (vocabulary, block) = (runner.requests().vocabulary(), runner.plan().options.block_size);
    runner.place_alone(0, 0, pages)?;
    let mut inputs = StepInputs::default();
    let mut start = 0;
    for chunk in tokens.chunks(SCORE_ROWS.min(runner.plan().limits.tokens)) {
        inputs.clear();
        inputs.push_tokens(0, chunk);
        inputs.add_pages(pages, block, start, chunk.len());
        inputs.request_logits(chunk.len());
        let bucket = runner.executor_mut().forward(&inputs)?;
        let (step, _, stream) = runner.executor_mut().step(bucket)?;
        let logits = step.output(StepOutput::Logits)?;
        let mut bytes = vec![0; chunk.len() * vocabulary * size_of::<f32>()];
        stream.download(&logits.slice(0, bytes.len())?, &mut bytes, "the logits of a text", STEP_TIMEOUT)?;
        let logits: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        for (row, logits) in logits.chunks_exact(vocabulary).enumerate() {
            each(start + row, logits);
        }
        start += chunk.len();
    }
    Ok(())
}

/// The natural logarithm of a token's probability: `ln softmax(logits)[token]`, in f64.
pub fn log_probability(logits: &[f32], token: u32) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
    let logit = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    f64::from(logit - largest) - sum.ln()
}

/// The `count` largest logits, largest first; the lower token first on ties.
fn largest(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut all: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
    let count = count.min(all.len());
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if count > 0 && count < all.len() {
        all.select_nth_unstable_by(count - 1, order);
    }
    all.truncate(count);
    all.sort_by(order);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_logits_are_in_order_and_ties_go_to_the_lower_token() {
        assert_eq!(largest(&[1.0, 5.0, 3.0, 5.0], 3), [(1, 5.0), (3, 5.0), (2, 3.0)]);
        assert_eq!(largest(&[1.0], 10), [(0, 1.0)]);
        assert_eq!(largest(&[1.0, 2.0], 0), []);
    }

    #[test]
    fn log_probabilities_sum_to_one() {
        let logits = [0.5, -3.0, 80.0, 79.0];
        let sum: f64 = (0..4).map(|token| log_probability(&logits, token).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-12);
        // Two logits one apart, the others negligible: p = 1 / (1 + 1/e).
        assert!((log_probability(&logits, 2) + (1.0 + (-1.0f64).exp()).ln()).abs() < 1e-12);
    }
}
