//! What an engine counts about itself.

use std::time::Duration;

/// Counts of an engine since it was loaded, and what it holds now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Statistics {
    /// Requests that wait for their first step, or for another after they were pre-empted.
    pub waiting: usize,
    /// Requests that run.
    pub running: usize,
    /// Pages of the KV cache that running requests hold.
    pub pages_in_use: usize,
    /// Pages that no request holds, but which keep a prefix for one that may come.
    pub pages_cached: usize,
    /// Pages there are.
    pub pages_total: usize,
    /// Steps launched.
    pub steps: u64,
    /// Kinds of step compiled: one for each size that came up, or that [`Engine::warm_up`](crate::Engine::warm_up) foresaw.
    pub compiled_steps: u64,
    /// Requests taken.
    pub requests: u64,
    /// Requests that ran to their end.
    pub finished: u64,
    /// Requests that were cancelled.
    pub cancelled: u64,
    /// Prompt tokens of the requests that were started.
    pub prompt_tokens: u64,
    /// Prompt tokens that were found in the cache and not computed.
    pub prefix_hit_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// How often a request had to give its place and its pages to another.
    pub preemptions: u64,
    /// Tokens that speculation proposed.
    pub proposed_tokens: u64,
    /// Tokens proposed that turned out to be right.
    pub accepted_tokens: u64,
    /// Seconds that each phase of a step took the host, in the order of [`Phase::ALL`].
    pub phases: [Histogram; Phase::ALL.len()],
}

impl Statistics {
    /// Adds what another engine counted.
    pub fn add(&mut self, other: &Self) {
        // Taken apart, so that no count can be forgotten here.
        let Self {
            waiting,
            running,
            pages_in_use,
            pages_cached,
            pages_total,
            steps,
            compiled_steps,
            requests,
            finished,
            cancelled,
            prompt_tokens,
            prefix_hit_tokens,
            generated_tokens,
            preemptions,
            proposed_tokens,
            accepted_tokens,
            phases,
        } = other;
        self.waiting += waiting;
        self.running += running;
        self.pages_in_use += pages_in_use;
        self.pages_cached += pages_cached;
        self.pages_total += pages_total;
        self.steps += steps;
        self.compiled_steps += compiled_steps;
        self.requests += requests;
        self.finished += finished;
        self.cancelled += cancelled;
        self.prompt_tokens += prompt_tokens;
        self.prefix_hit_tokens += prefix_hit_tokens;
        self.generated_tokens += generated_tokens;
        self.preemptions += preemptions;
        self.proposed_tokens += proposed_tokens;
        self.accepted_tokens += accepted_tokens;
        self.phases.iter_mut().zip(phases).for_each(|(own, other)| own.add(other));
    }
}

/// The parts of a step, as the host sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Choosing what runs, and bringing the request table up to date.
    Schedule,
    /// Enqueueing the step.
    Launch,
    /// Waiting for the device.
    Wait,
    /// Reading the tokens and deciding what ends.
    Deliver,
    /// Having a second model propose tokens, the wait for it included.
    Draft,
}

impl Phase {
    /// All of them, in order.
    pub const ALL: [Self; 5] = [Self::Schedule, Self::Launch, Self::Wait, Self::Deliver, Self::Draft];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Schedule => "schedule",
            Self::Launch => "launch",
            Self::Wait => "wait",
            Self::Deliver => "deliver",
            Self::Draft => "draft",
        }
    }
}

/// How often a duration fell between which bounds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    counts: [u64; Self::BOUNDS.len() + 1],
    sum: Duration,
}

impl Histogram {
    /// Upper bounds of the buckets in seconds, each included; the last bucket has none.
    pub const BOUNDS: [f64; 18] = [
        10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5,
        1.0, 2.0, 5.0,
    ];

    /// Counts a duration.
    pub(crate) fn record(&mut self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = Self::BOUNDS.partition_point(|bound| *bound < seconds);
        self.counts[bucket] += 1;
        self.sum += duration;
    }

    /// Adds what another one counted.
    pub(crate) fn add(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(own, other)| *own += other);
        self.sum += other.sum;
    }

    /// How many durations fell into each bucket: one more than there are bounds.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// How many durations were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// All durations together.
    pub fn sum(&self) -> Duration {
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_the_first_bucket_that_holds_them() {
        let mut histogram = Histogram::default();
        for micros in [1, 10, 11, 6_000_000] {
            histogram.record(Duration::from_micros(micros));
        }
        assert_eq!(histogram.counts()[..3], [2, 1, 0]);
        assert_eq!(histogram.counts().last(), Some(&1));
        assert_eq!((histogram.count(), histogram.sum()), (4, Duration::from_micros(6_000_022)));
        let mut sum = Statistics { running: 1, ..Statistics::default() };
        sum.add(&Statistics {
            running: 2,
            phases: std::array::from_fn(|_| histogram.clone()),
            ..Statistics::default()
        });
        sum.add(&sum.clone());
        assert_eq!((sum.running, sum.phases[3].count(), sum.phases[3].sum()), (6, 8, 2 * histogram.sum()));
    }
}
