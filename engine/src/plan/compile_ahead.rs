//! Compiles kernels ahead of time: a backend that compiles kernels caches them, so planning every call once makes the first
//! request fast.

use super::{EnginePlan, bucket::Bucket, calls::describe, plan_cache::plan_key};
use crate::error::Result;
use dsrun_core::{
    Error,
    checked::{CheckedPlan, ValidCall},
    device::Device,
};
use rayon::prelude::*;
use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

impl EnginePlan {
    /// Compiles the kernels of every step that the engine may run, on `jobs` threads: plans every distinct call and drops the
    /// plan. `progress` receives the number of calls done and of all calls, from any thread. Returns the number of distinct
    /// calls.
    ///
    /// # Errors
    /// The first failure of the device.
    pub fn compile_ahead(
        &self,
        device: &dyn Device,
        jobs: usize,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<usize> {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(jobs.max(1)).build();
        let threads =
            threads.map_err(|error| Error::internal(format!("starting threads failed: {error}")))?;
        let calls = threads.install(|| self.distinct_calls(device))?;
        let build = |call: &ValidCall| CheckedPlan::new(device, call.clone()).map(drop);
        let (next, done, failed) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        let failure = Mutex::new(None);
        progress(0, calls.len());
        let work = || {
            while !failed.load(Ordering::Relaxed) {
                match calls.get(next.fetch_add(1, Ordering::Relaxed)).map(build) {
                    None => return,
                    Some(Ok(())) => progress(done.fetch_add(1, Ordering::Relaxed) + 1, calls.len()),
                    Some(Err(error)) => {
                        failed.store(true, Ordering::Relaxed);
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    }
                }
            }
        };
        threads.scope(|scope| (0..threads.current_num_threads()).for_each(|_| scope.spawn(|_| work())));
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.into()),
            None => Ok(calls.len()),
        }
    }

    /// The calls of all steps that the engine may run, those of a draft model included, one for each distinct plan. Large ones
    /// come first: their kernels take longest to compile. Works on the threads of the current pool.
    pub(super) fn distinct_calls(&self, device: &dyn Device) -> Result<Vec<ValidCall>> {
        let mut distinct = HashMap::new();
        for plan in [Some(self), self.draft.as_ref().map(|draft| &*draft.plan)].into_iter().flatten() {
            let buckets = Bucket::all(plan.limits, plan.options.rows_per_request());
            let steps: Vec<_> = buckets
                .par_iter()
                .map(|bucket| plan.calls_of_step(device, *bucket))
                .collect::<Result<_>>()?;
            for (key, call) in steps.into_iter().flatten() {
                let place = distinct.len();
                distinct.entry(key).or_insert((place, call));
            }
        }
        let mut calls: Vec<(usize, ValidCall)> = distinct.into_values().collect();
        calls.sort_by_key(|(place, call)| (Reverse(call.operands.len()), *place));
        Ok(calls.into_iter().map(|(_, call)| call).collect())
    }

    /// The calls of a step, one for each distinct plan, with the keys of the plans.
    fn calls_of_step(&self, device: &dyn Device, bucket: Bucket) -> Result<Vec<(String, ValidCall)>> {
        let program = self.programs.merged(device, bucket, self.fixed)?;
        let calls = describe(&program, &bucket.sizes(self.fixed), self.programs.mesh())?;
        let mut seen = HashSet::new();
        let keyed = calls.into_iter().map(|call| (plan_key(&call), call));
        Ok(keyed.filter(|(key, _)| seen.insert(key.clone())).collect())
    }
}
