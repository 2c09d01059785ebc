//! Several users of one device at once: streams of one handle, and handles of their own, that together ask for more than the
//! device can run at a time.
//!
//! A kernel whose blocks wait for each other ends only if all of them find room at once, and beside another user's kernel they
//! may not. So the products here are large enough to fill a large device each, and are enqueued without a pause. What no
//! stream ends within the suite's limit has hung.

use super::{
    bench::{Bench, Bound, Outcome, Stop, floats, open},
    jobs::{Job, wide_jobs},
    replay::joined,
};
use crate::{subject::Subject, tensor::Tensor};
use dsrun_core::device::Device;
use std::{
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

const STREAMS: usize = 4;
const HANDLES: usize = 2;
/// Rounds for each element type, unless they take longer than [`BUDGET`] to enqueue: on a device that runs calls at once.
const ROUNDS: usize = 96;
const BUDGET: Duration = Duration::from_millis(400);

/// A stream with the jobs bound on it, each to results of its own.
struct User {
    bench: Bench,
    bound: Vec<Bound>,
}

impl User {
    /// Stream number `index` takes the operands of set `index`.
    fn new(device: &Arc<dyn Device>, jobs: &[Job], index: usize) -> Result<Self, Stop> {
        let mut bench = Bench::new(device)?;
        let mut bound = Vec::new();
        for job in jobs {
            let plan = bench.plan(job.op.clone(), &job.operands[index])?;
            bound.push(bench.bind(&plan, &job.operands[index])?);
        }
        Ok(Self { bench, bound })
    }

    fn check(&mut self, jobs: &[Job], index: usize, how: &str) -> Outcome {
        for (job, bound) in jobs.iter().zip(&self.bound) {
            let found: Vec<Tensor> =
                bound.results.iter().map(|held| self.bench.get(held)).collect::<Result<_, _>>()?;
            job.check(how, index, &found)?;
        }
        Ok(())
    }
}

/// Four streams of one handle, each with products that fill the device, enqueued by turns without waiting.
pub(super) fn streams(subject: &Subject) -> Outcome {
    for dtype in floats(&**subject.device()) {
        let mut bench = Bench::new(subject.device())?;
        let jobs = wide_jobs(&mut bench, dtype, STREAMS)?;
        bench.wait()?;
        let mut users = Vec::new();
        for index in 0..STREAMS {
            users.push(User::new(subject.device(), &jobs, index)?);
        }
        let start = Instant::now();
        for round in 0..ROUNDS {
            if round > 0 && start.elapsed() > BUDGET {
                break;
            }
            for job in 0..jobs.len() {
                users.iter_mut().try_for_each(|user| user.bench.enqueue(&user.bound[job]))?;
            }
        }
        for (index, user) in users.iter_mut().enumerate() {
            user.bench.wait()?;
            user.check(&jobs, index, "beside three other streams")?;
        }
    }
    Ok(())
}

/// Two handles of the device, each on a thread of its own, run products and graphs of them at once.
pub(super) fn handles(subject: &Subject) -> Outcome {
    let start = Barrier::new(HANDLES);
    let run = |index: usize| -> Outcome {
        let prepared = (|| {
            let device = open(subject, subject.options())?;
            let mut bench = Bench::new(&device)?;
            let mut work = Vec::new();
            for dtype in floats(&*device) {
                let jobs = wide_jobs(&mut bench, dtype, HANDLES)?;
                bench.wait()?;
                let eager = User::new(&device, &jobs, index)?;
                let mut captured = User::new(&device, &jobs, index)?;
                let graph = match device.graphs() {
                    Some(graphs) => {
                        captured.bench.wait()?;
                        let bound = std::mem::take(&mut captured.bound);
                        let mut calls = Vec::new();
                        for Bound { call, .. } in bound {
                            calls.push(call);
                        }
                        Some(graphs.capture(&mut *captured.bench.stream, calls)?)
                    }
                    None => None,
                };
                work.push((jobs, eager, captured, graph));
            }
            Ok::<_, Stop>(work)
        })();
        // Both arrive, whatever went wrong.
        start.wait();
        for (jobs, eager, captured, graph) in &mut prepared? {
            let begun = Instant::now();
            for round in 0..ROUNDS {
                if round > 0 && begun.elapsed() > BUDGET {
                    break;
                }
                for bound in &eager.bound {
                    eager.bench.enqueue(bound)?;
                }
                if let Some(graph) = graph {
                    graph.launch(&mut *captured.bench.stream)?;
                }
            }
            captured.bench.wait()?;
            eager.bench.wait()?;
            eager.check(jobs, index, "beside another handle of the device")?;
        }
        Ok(())
    };
    let run = &run;
    let outcomes: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..HANDLES).map(|index| scope.spawn(move || run(index))).collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
    });
    outcomes.into_iter().try_for_each(joined)
}
