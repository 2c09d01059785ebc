//! Finds the best size of a step by timing steps of growing size.

use super::{Runner, inputs::StepInputs};
use crate::error::Result;
use std::time::Instant;

/// The share of the best rate of prompt tokens that the chosen step has to reach.
const GOOD_RATE: f64 = 0.9;

/// The number of times a step of each size is timed; the fastest counts.
const REPEATS: usize = 3;

/// Seconds after which a size is not timed again: one step of a slow device is enough.
const MAX_SECONDS: f64 = 0.2;

/// The gain that justifies trying larger steps.
const WORTHWHILE_GAIN: f64 = 1.05;

impl Runner {
    /// Limits steps to the smallest size that processes prompts nearly as fast as any size up to `step-tokens`: a larger step would
    /// only delay the tokens of requests that generate. At least half of a step is left to prompts, however many requests
    /// generate. Compiles and times steps of one prompt.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn tune_step(&mut self) -> Result<()> {
        let plan = self.plan();
        let limit = plan.limits.tokens;
        let smallest = (2 * plan.fixed.requests).next_power_of_two().max(16).min(limit);
        let powers = (0..usize::BITS).map(|power| 1usize << power);
        let sizes: Vec<usize> = powers
            .skip_while(|size| *size < smallest)
            .take_while(|size| *size < limit)
            .chain([limit])
            .collect();
        let pages = self.requests.scheduler().pages().total();
        let longest = plan.context.min(pages * plan.options.block_size);
        let rates = self.with_pages(longest, |runner, pages| {
            let mut rates = Vec::new();
            for size in sizes.into_iter().filter(|size| *size <= longest) {
                rates.push((size, size as f64 / runner.time_prompt(pages, size)?));
                if has_settled(&rates) {
                    break;
                }
            }
            Ok(rates)
        })?;
        if let Some(size) = smallest_good(&rates) {
            tracing::info!(size, ?rates, "tokens per step, and prompt tokens per second of each size tried");
            self.requests.scheduler_mut().set_tokens(size);
        }
        self.count();
        Ok(())
    }

    /// Seconds of a step with one prompt of this many tokens.
    fn time_prompt(&mut self, pages: &[i32], tokens: usize) -> Result<f64> {
        let vocabulary = self.requests.vocabulary();
        let prompt: Vec<i32> = (0..tokens).map(|index| (index % vocabulary) as i32).collect();
        let mut inputs = StepInputs::default();
        inputs.push_tokens(0, &prompt);
        inputs.request_logits(1);
        let bucket = inputs.bucket(self.plan().limits);
        self.executor.launch_empty(bucket)?;
        let (mut best, mut spent) = (f64::INFINITY, 0.0);
        for _ in 0..REPEATS {
            if spent > MAX_SECONDS {
                break;
            }
            self.place_alone(0, 0, pages)?;
            self.executor.synchronize("a step that is timed")?;
            let start = Instant::now();
            self.executor.forward(&inputs)?;
            self.executor.synchronize("a step that is timed")?;
            let seconds = start.elapsed().as_secs_f64();
            (best, spent) = (best.min(seconds), spent + seconds);
        }
        Ok(best.max(f64::MIN_POSITIVE))
    }
}

/// The smallest size whose rate is nearly the best.
fn smallest_good(rates: &[(usize, f64)]) -> Option<usize> {
    let best = rates.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    rates.iter().find(|(_, rate)| *rate >= GOOD_RATE * best).map(|(size, _)| *size)
}

/// Whether the last two sizes gained nothing over those before.
fn has_settled(rates: &[(usize, f64)]) -> bool {
    let (before, last) = rates.split_at(rates.len().saturating_sub(2));
    let best = before.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    last.iter().all(|(_, rate)| *rate < WORTHWHILE_GAIN * best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_nearly_best_size_is_chosen() {
        assert_eq!(smallest_good(&[(16, 100.0), (32, 190.0), (64, 200.0), (128, 205.0)]), Some(32));
        assert_eq!(smallest_good(&[(16, 100.0)]), Some(16));
        assert_eq!(smallest_good(&[]), None);
    }

    #[test]
    fn larger_sizes_are_tried_until_two_in_a_row_gain_nothing() {
        let rates =
            [(16, 100.0), (32, 190.0), (64, 192.0), (128, 250.0), (256, 240.0), (512, 255.0), (1024, 250.0)];
        let settled = (1..=rates.len()).find(|tried| has_settled(&rates[..*tried]));
        assert_eq!(settled, Some(6), "64 alone gains nothing over 32, but 128 does");
    }
}
