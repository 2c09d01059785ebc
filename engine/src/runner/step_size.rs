//! Finds the best size of a step by timing steps of growing size.

use super::{Runner, inputs::StepInputs};
use crate::error::Result;
use std::time::Instant;

/// The chosen step size must reach this share of the best prefill rate.
const GOOD_RATE: f64 = 0.9;

/// The number of rounds in which a step of each size is timed. The minimum is used, because another busy program slows down some
/// rounds, but seldom all.
const ROUNDS: usize = 6;

/// A size that has been timed for this many seconds in total is not timed again.
const MAX_SECONDS: f64 = 0.2;

/// The gain that justifies trying larger steps.
const WORTHWHILE_GAIN: f64 = 1.05;

impl Runner {
    /// Limits steps to the smallest size whose prefill rate is close to the best of all sizes up to `step-tokens`: a larger step
    /// would only delay the tokens of generating requests. The size leaves at least half of a step to prompts when the maximum
    /// number of requests generates. Compiles and times steps of one prompt.
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
            let sizes: Vec<usize> = sizes.into_iter().filter(|size| *size <= longest).collect();
            measure(&sizes, |size| runner.time_prompt(pages, size))
        })?;
        if let Some(size) = smallest_good(&rates) {
            let tried: Vec<String> = rates.iter().map(|(size, rate)| format!("{size}: {rate:.0}")).collect();
            let tried = tried.join(", ");
            tracing::info!(size, tried, "tokens per step, and prompt tokens per second of each size tried");
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
        inputs.add_pages(pages, self.plan().options.block_size, 0, tokens);
        inputs.request_logits(1);
        let bucket = inputs.bucket(self.plan().limits);
        self.executor.launch_empty(bucket)?;
        self.place_alone(0, 0, pages)?;
        self.executor.synchronize("a step that is timed")?;
        let start = Instant::now();
        self.executor.forward(&inputs)?;
        self.executor.synchronize("a step that is timed")?;
        Ok(start.elapsed().as_secs_f64().max(f64::MIN_POSITIVE))
    }
}

/// The rate of each size, in tokens per second, up to the size beyond which larger steps gain nothing. `time` returns the seconds
/// of a step of a size. Every round times all sizes tried so far, so that a busy period of the machine does not affect a single
/// size.
fn measure(sizes: &[usize], mut time: impl FnMut(usize) -> Result<f64>) -> Result<Vec<(usize, f64)>> {
    /// The fastest time of a size, and the sum of its times.
    struct Timed {
        size: usize,
        best: f64,
        spent: f64,
    }
    let rates = |timed: &[Timed]| -> Vec<(usize, f64)> {
        timed.iter().map(|timed| (timed.size, timed.size as f64 / timed.best)).collect()
    };
    let mut timed: Vec<Timed> = Vec::new();
    loop {
        for size in &sizes[timed.len()..] {
            let seconds = time(*size)?;
            timed.push(Timed { size: *size, best: seconds, spent: seconds });
            if has_settled(&rates(&timed)) {
                break;
            }
        }
        for _ in 1..ROUNDS {
            for timed in timed.iter_mut().filter(|timed| timed.spent <= MAX_SECONDS) {
                let seconds = time(timed.size)?;
                (timed.best, timed.spent) = (timed.best.min(seconds), timed.spent + seconds);
            }
        }
        // The lack of a gain may have been caused by a busy moment, so check again after all rounds.
        let rates = rates(&timed);
        if timed.len() == sizes.len() || has_settled(&rates) {
            return Ok(rates);
        }
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

    /// The size that is chosen for a device with these times, which another program slows down whenever `busy` says so.
    fn chosen(busy: impl Fn(usize) -> bool) -> Option<usize> {
        let sizes: Vec<usize> = (4..12).map(|power| 1 << power).collect();
        let mut calls = 0;
        let rates = measure(&sizes, |size| {
            calls += 1;
            // Up to 128 tokens a step takes as long as reading the weights.
            let seconds = 1e-3 * (size as f64 / 128.0).max(1.0);
            Ok(if busy(calls) { 3.0 * seconds } else { seconds })
        });
        smallest_good(&rates.expect("no step fails"))
    }

    #[test]
    fn a_busy_machine_does_not_change_the_choice() {
        assert_eq!(chosen(|_| false), Some(128));
        for start in 1..60 {
            for calls in 1..=12 {
                let busy = start..start + calls;
                let size = chosen(|call| busy.contains(&call));
                assert_eq!(size, Some(128), "{calls} slow calls from the {start}th on");
            }
        }
    }

    #[test]
    fn larger_sizes_are_tried_until_two_in_a_row_gain_nothing() {
        let rates =
            [(16, 100.0), (32, 190.0), (64, 192.0), (128, 250.0), (256, 240.0), (512, 255.0), (1024, 250.0)];
        let settled = (1..=rates.len()).find(|tried| has_settled(&rates[..*tried]));
        assert_eq!(settled, Some(6), "64 alone gains nothing over 32, but 128 does");
    }
}
