//! Builds kernels ahead of time: a backend that compiles kernels caches them, so planning every call once makes the first request
//! fast.

use super::{EnginePlan, bucket::Bucket, calls::describe, plan_cache::plan_key};
use crate::error::{EngineError, Result};
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
    /// Builds the kernels of every step that the engine may run, with `jobs` threads: plans every distinct call and drops the
    /// plan, and has the device build what the graphs of these steps need besides. `progress` receives the number of tasks done
    /// and of all tasks, from any thread. Returns the number of distinct calls.
    ///
    /// # Errors
    /// The first failure of the device.
    pub fn compile_ahead(
        &self,
        device: &dyn Device,
        jobs: usize,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<usize> {
        let steps = self.steps();
        let calls = distinct_calls(&steps)?;
        let graphs = device.graphs().filter(|_| self.options.graphs);
        let build_graph = |step: &Step<'_>| match graphs {
            Some(graphs) => Ok(graphs.prepare(&step.calls()?)?),
            None => Ok(()),
        };
        let build_call =
            |call: &CallDesc| CheckedPlan::new(device, call.clone()).map(drop).map_err(EngineError::from);
        let total = steps.len() + calls.len();
        // Kernels of whole graphs take longest to build, so they come first.
        let task = |index: usize| match index.checked_sub(steps.len()) {
            None => steps.get(index).map(build_graph),
            Some(index) => calls.get(index).map(build_call),
        };
        let (next, done, failed) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        let failure = Mutex::new(None);
        progress(0, total);
        let work = || {
            while !failed.load(Ordering::Relaxed) {
                match task(next.fetch_add(1, Ordering::Relaxed)) {
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

    /// The steps that the engine may run, those of a draft model included.
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
    /// Describes the calls of the step, in their order.
    fn calls(&self) -> Result<Vec<CallDesc>> {
        let Self { plan, bucket } = *self;
        Ok(describe(plan.programs.of(bucket), &bucket.sizes(plan.fixed))?)
    }
}

/// The calls of all steps, one for each distinct plan.
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
