//! The tuner: chooses among ways to run a launch by measuring them on the device at hand, when a plan is first bound.
//!
//! An answer is kept on disk beside the kernels, under a hash of the kernel's source, the compiler, the device and the question. So
//! a device is measured once, for at most [`BUDGET`] a question.

use crate::{
    arch::DeviceSpec,
    driver::{context::Context, raw::RawStream},
};
use dsrun_core::Result;
use std::time::{Duration, Instant};

/// How often a candidate runs; its shortest time counts.
const REPEATS: usize = 5;
/// How long a question may take. Candidates that were not measured by then are left out.
const BUDGET: Duration = Duration::from_secs(3);

/// The fastest of some candidates, by number, as remembered or as measured. `unit` is the kernel's source and `question` what else tells
/// this choice from others; `run` enqueues a candidate.
///
/// The first candidate is the one that is expected to be fastest: it is the answer where nothing can be measured.
pub(crate) fn fastest(
    context: &Context,
    device: &DeviceSpec,
    unit: &str,
    question: &str,
    candidates: usize,
    run: &dyn Fn(usize, RawStream) -> Result<()>,
) -> usize {
    let question = format!("{device:?}: {question}");
    let remembered = context.recall(unit, &question).and_then(|answer| answer.parse().ok());
    if let Some(answer) = remembered.filter(|answer| *answer < candidates) {
        return answer;
    }
    match measure(context, candidates, run) {
        Ok(best) => {
            context.remember(unit, &question, &best.to_string());
            best
        }
        Err(error) => {
            tracing::debug!(%error, unit, "candidates cannot be measured: the first is taken");
            0
        }
    }
}

fn measure(
    context: &Context,
    candidates: usize,
    run: &dyn Fn(usize, RawStream) -> Result<()>,
) -> Result<usize> {
    let start = Instant::now();
    let mut best = (0, f32::INFINITY);
    for index in 0..candidates {
        let time = context.time(REPEATS, |stream| run(index, stream))?;
        tracing::debug!(index, time, "a candidate was measured, in milliseconds");
        if time < best.1 {
            best = (index, time);
        }
        if start.elapsed() > BUDGET {
            tracing::debug!(measured = index + 1, candidates, "the tuner's time is used up");
            break;
        }
    }
    Ok(best.0)
}
