//! Planning ahead: a backend that compiles keeps what it compiled, so planning every call once makes the first request fast.

use crate::{
    compile::{Bucket, describe, plan_key, sizes},
    error::Result,
    load::EnginePlan,
};
use dsrun_core::{checked::CheckedPlan, device::Device, kernels::CallDesc};
use std::{
    collections::HashMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

impl EnginePlan {
    /// Plans every distinct call of every step the engine may run, by `jobs` threads, and drops the plans. `progress` is told
    /// how many are done, and how many there are, by any thread. Gives their number.
    ///
    /// # Errors
    /// The first failure of the device.
    pub fn prepare(
        &self,
        device: &dyn Device,
        jobs: usize,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<usize> {
        let calls = self.distinct_calls()?;
        let (next, done, failed) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        let failure = Mutex::new(None);
        progress(0, calls.len());
        let work = || {
            while let Some(call) = calls.get(next.fetch_add(1, Ordering::Relaxed)) {
                if failed.load(Ordering::Relaxed) {
                    return;
                }
                match CheckedPlan::new(device, call.clone()) {
                    Ok(_) => progress(done.fetch_add(1, Ordering::Relaxed) + 1, calls.len()),
                    Err(error) => {
                        failed.store(true, Ordering::Relaxed);
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    }
                }
            }
        };
        thread::scope(|scope| (0..jobs.clamp(1, calls.len().max(1))).for_each(|_| drop(scope.spawn(work))));
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.into()),
            None => Ok(calls.len()),
        }
    }

    /// The calls of all steps, those of a second model too, without those that are planned alike.
    fn distinct_calls(&self) -> Result<Vec<CallDesc>> {
        let mut calls = HashMap::new();
        for plan in [Some(self), self.draft.as_ref().map(|draft| &*draft.plan)].into_iter().flatten() {
            for bucket in buckets(plan.limits, plan.options.rows_per_request()) {
                for call in describe(&plan.program, &sizes(bucket, plan.fixed))? {
                    let place = calls.len();
                    calls.entry(plan_key(&call)).or_insert((place, call));
                }
            }
        }
        let mut calls: Vec<(usize, CallDesc)> = calls.into_values().collect();
        calls.sort_by_key(|(place, _)| *place);
        Ok(calls.into_iter().map(|(_, call)| call).collect())
    }
}

/// Every bucket that a step can have: at least a token for each sequence and each row, at most `rows` of these for a sequence.
fn buckets(limits: Bucket, rows: usize) -> Vec<Bucket> {
    let up_to = |limit: usize| {
        let powers = (0..usize::BITS).map(|power| 1usize << power).take_while(move |size| *size < limit);
        powers.chain([limit.max(1)])
    };
    let mut buckets = Vec::new();
    for sequences in up_to(limits.sequences) {
        for rows in up_to((sequences * rows).next_power_of_two().min(limits.rows)) {
            let enough = up_to(limits.tokens).filter(|tokens| *tokens >= sequences.max(rows));
            buckets.extend(enough.map(|tokens| Bucket { tokens, sequences, rows }));
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_fits_one_of_the_buckets() {
        for (each, most) in [(1, 6), (3, 18), (5, 30), (64, 48)] {
            let limits = Bucket { tokens: 48, sequences: 6, rows: most };
            let buckets = buckets(limits, each);
            for sequences in 1..=limits.sequences {
                for rows in 1..=(sequences * each).min(most) {
                    for tokens in sequences.max(rows)..=limits.tokens {
                        let bucket = Bucket::fitting(tokens, sequences, rows, limits);
                        assert!(buckets.contains(&bucket), "{bucket:?} for {tokens} {sequences} {rows}");
                    }
                }
            }
        }
    }
}
