//! The statistics of an engine.

use std::time::Duration;

/// Counters of an engine since it was loaded, and its current state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Statistics {
    /// Requests that wait to start, or to resume after a pre-emption.
    pub waiting: usize,
    /// Running requests.
    pub running: usize,
    /// Pages of the KV cache that running requests hold.
    pub pages_in_use: usize,
    /// Pages without a holder that keep a prefix for later requests.
    pub pages_cached: usize,
    /// All pages of the KV cache.
    pub pages_total: usize,
    /// Steps launched.
    pub steps: u64,
    /// Steps compiled: one for each bucket that was needed, or that [`Engine::warm_up`](crate::Engine::warm_up) compiled.
    pub compiled_steps: u64,
    /// Requests submitted.
    pub requests: u64,
    /// Requests that ran to their end.
    pub finished: u64,
    /// Requests that were cancelled.
    pub cancelled: u64,
    /// Prompt tokens of the requests that have started.
    pub prompt_tokens: u64,
    /// Prompt tokens that were found in the cache, on the device or outside it.
    pub prefix_hit_tokens: u64,
    /// Tokens whose pages were loaded from host memory.
    pub host_hit_tokens: u64,
    /// Tokens whose pages were loaded from the folder of the prefix cache.
    pub folder_hit_tokens: u64,
    /// Bytes of pages that are kept in host memory for later requests.
    pub prefix_host_bytes: u64,
    /// Pages that were written to the folder of the prefix cache.
    pub pages_written: u64,
    /// Pages in the folder of the prefix cache that were damaged, and computed again.
    pub pages_damaged: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Pre-emptions of requests.
    pub preemptions: u64,
    /// Tokens proposed by speculation.
    pub proposed_tokens: u64,
    /// Proposed tokens that were accepted.
    pub accepted_tokens: u64,
    /// Bytes of streamed weights whose copy from host memory was enqueued.
    pub streamed_bytes: u64,
    /// Bytes of KV cache in host memory whose copy to the device was enqueued, for steps with prompts.
    pub cache_bytes: u64,
    /// Bytes of weights that were read from disk.
    pub disk_bytes: u64,
    /// The bytes per second at which the disk was read when reading began and nothing else held it up.
    pub disk_rate: Option<f64>,
    /// The time that each phase of a step took on the host, in the order of [`Phase::ALL`].
    pub phases: [Histogram; Phase::ALL.len()],
}

impl Statistics {
    /// Adds the statistics of another engine.
    pub fn add(&mut self, other: &Self) {
        // Destructured, so that a new field cannot be forgotten here.
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
            host_hit_tokens,
            folder_hit_tokens,
            prefix_host_bytes,
            pages_written,
            pages_damaged,
            generated_tokens,
            preemptions,
            proposed_tokens,
            accepted_tokens,
            streamed_bytes,
            cache_bytes,
            disk_bytes,
            disk_rate,
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
        self.host_hit_tokens += host_hit_tokens;
        self.folder_hit_tokens += folder_hit_tokens;
        self.prefix_host_bytes += prefix_host_bytes;
        self.pages_written += pages_written;
        self.pages_damaged += pages_damaged;
        self.generated_tokens += generated_tokens;
        self.preemptions += preemptions;
        self.proposed_tokens += proposed_tokens;
        self.accepted_tokens += accepted_tokens;
        self.streamed_bytes += streamed_bytes;
        self.cache_bytes += cache_bytes;
        self.disk_bytes += disk_bytes;
        self.disk_rate = self.disk_rate.or(*disk_rate);
        self.phases.iter_mut().zip(phases).for_each(|(own, other)| own.add(other));
    }
}

/// A phase of a step on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Planning the step, and updating the request table.
    Schedule,
    /// Enqueueing the step.
    Launch,
    /// Waiting for the device.
    Wait,
    /// Reading the tokens and handing them to their requests.
    Deliver,
    /// Proposing tokens with a draft model, the wait for it included.
    Draft,
}

impl Phase {
    /// Every phase, in order.
    pub const ALL: [Self; 5] = [Self::Schedule, Self::Launch, Self::Wait, Self::Deliver, Self::Draft];

    /// The name in metrics.
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

/// A histogram of durations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    counts: [u64; Self::BOUNDS.len() + 1],
    sum: Duration,
}

impl Histogram {
    /// The upper bounds of the buckets in seconds, inclusive; the last bucket has no bound.
    pub const BOUNDS: [f64; 18] = [
        10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5,
        1.0, 2.0, 5.0,
    ];

    /// Records a duration.
    pub(crate) fn record(&mut self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = Self::BOUNDS.partition_point(|bound| *bound < seconds);
        self.counts[bucket] += 1;
        self.sum += duration;
    }

    /// Adds the counts of another histogram.
    pub(crate) fn add(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(own, other)| *own += other);
        self.sum += other.sum;
    }

    /// The number of durations in each bucket; there is one bucket more than bounds.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// The number of durations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of the durations.
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
