//! Planning ahead: a backend that compiles keeps what it compiled, so planning every call once makes the first request fast.

use crate::{
    error::{EngineError, Result},
    plan::EnginePlan,
    plan::{Bucket, describe, plan_key, sizes},
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
    /// Plans every distinct call of every step the engine may run, by `jobs` threads, and drops the plans; before that, has the
    /// device build what graphs of these steps need besides. `progress` is told how much is done, and how much there is, by any
    /// thread. Gives the number of calls.
    ///
    /// # Errors
    /// The first failure of the device.
    pub fn prepare(
        &self,
        device: &dyn Device,
        jobs: usize,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<usize> {
        let steps = self.steps();
        let calls = distinct_calls(&steps)?;
        let graphs = device.graphs().filter(|_| self.options.graphs);
        // What takes a graph's calls together takes longest to build: it is begun first.
        let graph = |step: &Step<'_>| match graphs {
            Some(graphs) => Ok(graphs.prepare(&step.calls()?)?),
            None => Ok(()),
        };
        let call =
            |call: &CallDesc| CheckedPlan::new(device, call.clone()).map(drop).map_err(EngineError::from);
        let total = steps.len() + calls.len();
        let piece = |index: usize| match index.checked_sub(steps.len()) {
            None => steps.get(index).map(graph),
            Some(index) => calls.get(index).map(call),
        };
        let (next, done, failed) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        let failure = Mutex::new(None);
        progress(0, total);
        let work = || {
            while !failed.load(Ordering::Relaxed) {
                match piece(next.fetch_add(1, Ordering::Relaxed)) {
                    None => return,
                    Some(Ok(())) => progress(done.fetch_add(1, Ordering::Relaxed) + 1, total),
                    Some(Err(error)) => {
                        failed.store(true, Ordering::Relaxed);
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    }
                }
            }
        };
        thread::scope(|scope| (0..jobs.clamp(1, total.max(1))).for_each(|_| drop(scope.spawn(work))));
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(calls.len()),
        }
    }

    /// The steps the engine may run, those of a second model too.
    fn steps(&self) -> Vec<Step<'_>> {
        let mut steps = Vec::new();
        for plan in [Some(self), self.draft.as_ref().map(|draft| &*draft.plan)].into_iter().flatten() {
            let buckets = Bucket::all(plan.limits, plan.options.rows_per_request());
            steps.extend(buckets.into_iter().map(|bucket| Step { plan, bucket }));
        }
        steps
    }
}

/// A step of an engine.
struct Step<'a> {
    plan: &'a EnginePlan,
    bucket: Bucket,
}

impl Step<'_> {
    /// Its calls, in their order.
    fn calls(&self) -> Result<Vec<CallDesc>> {
        let Self { plan, bucket } = *self;
        Ok(describe(plan.program_of(bucket), &sizes(bucket, plan.fixed))?)
    }
}

/// The calls of all steps, without those that are planned alike.
fn distinct_calls(steps: &[Step<'_>]) -> Result<Vec<CallDesc>> {
    let mut calls = HashMap::new();
    for step in steps {
        for call in step.calls()? {
            let place = calls.len();
            calls.entry(plan_key(&call)).or_insert((place, call));
        }
    }
    let mut calls: Vec<(usize, CallDesc)> = calls.into_values().collect();
    calls.sort_by_key(|(place, _)| *place);
    Ok(calls.into_iter().map(|(_, call)| call).collect())
}
