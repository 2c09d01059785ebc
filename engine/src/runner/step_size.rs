//! What runs while no request does: teacher-forced logits, and finding out how large a step is best.

use crate::engine::{Engine, STEP_TIMEOUT, as_i32};
use crate::{
    error::{EngineError, Result},
    runner::inputs::StepInputs,
    runner::request_table::Row,
    sampling::SamplingOptions,
};
use dsrun_core::{
    Code, Error,
    device::{BufferSlice, Stream},
};
use std::time::Instant;

/// Rows of logits that are scored at a time.
const SCORE_ROWS: usize = 16;

/// The share of the best rate of prompt tokens that the smallest good step reaches.
const GOOD_RATE: f64 = 0.9;

/// How often a step of each size is timed; the fastest counts.
const TUNE_REPEATS: usize = 3;

/// How long steps of a size are timed at most, in seconds: those of a slow device tell enough by one.
const TUNE_SECONDS: f64 = 0.2;

/// What a larger step has to bring to be worth trying larger ones still.
const WORTHWHILE: f64 = 1.05;

impl Engine {
    /// The logits after each token of a sequence, given those before it: `each(position, logits)` is called in order.
    ///
    /// # Errors
    /// As [`Self::submit`] for the tokens; if requests are running; if the device failed.
    pub fn score(&mut self, tokens: &[u32], each: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        self.limits().check_prompt(tokens)?;
        self.with_pages(tokens.len(), |engine, pages| engine.score_in(pages, tokens, each))
    }

    /// Lends pages for so many tokens while no request runs.
    pub(crate) fn with_pages<T>(
        &mut self,
        tokens: usize,
        work: impl FnOnce(&mut Self, &[i32]) -> Result<T>,
    ) -> Result<T> {
        if !self.is_idle() {
            return Err(Error::new(Code::FailedPrecondition, "requests are running").into());
        }
        let block = self.plan.options.block_size;
        let pages = self.scheduler.pages_mut().take_many(tokens.div_ceil(block));
        let pages = pages
            .ok_or(EngineError::PromptTooLong { tokens, context: self.scheduler.pages().total() * block })?;
        let done = work(self, &pages);
        self.scheduler.pages_mut().give(pages.into_iter());
        done
    }

    fn score_in(&mut self, pages: &[i32], tokens: &[u32], each: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        let tokens: Vec<i32> = as_i32(tokens).collect();
        self.place_alone(0, 0, pages)?;
        let mut start = 0;
        for chunk in tokens.chunks(SCORE_ROWS.min(self.plan.limits.tokens)) {
            let mut inputs = std::mem::take(&mut self.inputs);
            inputs.clear();
            inputs.bring_tokens(0, chunk);
            inputs.want_logits(chunk.len());
            let bucket = self.forward(&inputs)?;
            self.inputs = inputs;
            let logits = self.steps[&bucket].output("logits")?;
            let logits = download::<4>(&mut *self.stream, logits, chunk.len() * self.vocabulary)?;
            let logits: Vec<f32> = logits.into_iter().map(f32::from_le_bytes).collect();
            for (row, logits) in logits.chunks_exact(self.vocabulary).enumerate() {
                each(start + row, logits);
            }
            start += chunk.len();
        }
        Ok(())
    }

    /// Sets a row of the request table beside the scheduler.
    pub(crate) fn place_alone(&mut self, slot: usize, length: usize, pages: &[i32]) -> Result<()> {
        self.table.place(slot, Row { length, pages, sampling: &SamplingOptions::default() });
        self.table.upload(&mut *self.stream)
    }

    /// Finds the smallest step that processes prompts nearly as fast as any up to `step-tokens`, and keeps steps to it: a
    /// larger one would only delay the tokens of requests that generate. Half of a step at least is left to prompts, however many
    /// requests generate. Times steps of one prompt, so it compiles them.
    pub(crate) fn tune_step(&mut self) -> Result<()> {
        let limit = self.plan.limits.tokens;
        let smallest = (2 * self.plan.fixed.requests).next_power_of_two().max(16).min(limit);
        let powers = (0..usize::BITS).map(|power| 1usize << power);
        let sizes: Vec<usize> = powers
            .skip_while(|size| *size < smallest)
            .take_while(|size| *size < limit)
            .chain([limit])
            .collect();
        let longest = self.plan.context.min(self.scheduler.pages().total() * self.plan.options.block_size);
        let rates = self.with_pages(longest, |engine, pages| {
            let mut rates = Vec::new();
            for size in sizes.into_iter().filter(|size| *size <= longest) {
                rates.push((size, size as f64 / engine.time_prompt(pages, size)?));
                if has_settled(&rates) {
                    break;
                }
            }
            Ok(rates)
        })?;
        if let Some(size) = smallest_good(&rates) {
            tracing::info!(size, ?rates, "tokens per step, and prompt tokens per second of each size tried");
            self.scheduler.set_tokens(size);
        }
        Ok(())
    }

    /// Seconds that a step of one prompt of so many tokens takes.
    fn time_prompt(&mut self, pages: &[i32], tokens: usize) -> Result<f64> {
        let prompt: Vec<i32> = (0..tokens).map(|index| (index % self.vocabulary) as i32).collect();
        let mut inputs = StepInputs::default();
        inputs.bring_tokens(0, &prompt);
        inputs.want_logits(1);
        self.launch_empty(inputs.bucket(self.plan.limits))?;
        let (mut best, mut spent) = (f64::INFINITY, 0.0);
        for _ in 0..TUNE_REPEATS {
            if spent > TUNE_SECONDS {
                break;
            }
            self.place_alone(0, 0, pages)?;
            self.stream.synchronize("a step that is timed", STEP_TIMEOUT)?;
            let start = Instant::now();
            self.forward(&inputs)?;
            self.stream.synchronize("a step that is timed", STEP_TIMEOUT)?;
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

/// Whether the last two sizes brought no more than those before.
fn has_settled(rates: &[(usize, f64)]) -> bool {
    let (before, last) = rates.split_at(rates.len().saturating_sub(2));
    let best = before.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    last.iter().all(|(_, rate)| *rate < WORTHWHILE * best)
}

/// The first `count` elements of an output.
fn download<const N: usize>(
    stream: &mut dyn Stream,
    output: &BufferSlice,
    count: usize,
) -> Result<Vec<[u8; N]>> {
    let mut bytes = vec![0; count * N];
    stream.download(&output.slice(0, bytes.len())?, &mut bytes, "the results of a step", STEP_TIMEOUT)?;
    Ok(bytes.as_chunks::<N>().0.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_step_that_is_nearly_the_best_is_taken() {
        assert_eq!(smallest_good(&[(16, 100.0), (32, 190.0), (64, 200.0), (128, 205.0)]), Some(32));
        assert_eq!(smallest_good(&[(16, 100.0)]), Some(16));
        assert_eq!(smallest_good(&[]), None);
    }

    #[test]
    fn larger_steps_are_tried_until_two_brought_nothing() {
        let rates =
            [(16, 100.0), (32, 190.0), (64, 192.0), (128, 250.0), (256, 240.0), (512, 255.0), (1024, 250.0)];
        let settled = (1..=rates.len()).find(|tried| has_settled(&rates[..*tried]));
        assert_eq!(settled, Some(6), "64 alone is no more than 32, but 128 is");
    }
}
