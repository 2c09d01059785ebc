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
            for bucket in Bucket::all(plan.limits, plan.options.rows_per_request()) {
                for call in describe(plan.program_of(bucket), &sizes(bucket, plan.fixed))? {
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
