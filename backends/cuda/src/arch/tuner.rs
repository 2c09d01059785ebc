//! The autotuner: chooses among configurations of a launch by timing them on the device, when a plan is first bound.
//!
//! Results are cached on disk beside the kernels, under a hash of the kernel's source, the compiler, the device and the
//! `question`, which describes the choice. So each choice is measured once per device, for at most [`BUDGET`].

use crate::{
    arch::DeviceSpec,
    driver::{context::Context, raw::RawStream},
};
use dsrun_core::Result;
use std::time::{Duration, Instant};

/// The number of runs of a candidate; the shortest time is used.
const REPEATS: usize = 5;
/// The time limit of one choice. Candidates that were not measured by then are skipped.
const BUDGET: Duration = Duration::from_secs(3);

/// The index of the fastest candidate, from the cache or by measurement. `unit` is the kernel's source, and `question` identifies
/// the choice within it; `run` enqueues a candidate.
///
/// The first candidate should be the one expected to be fastest: it is used if nothing can be measured.
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
            tracing::debug!(%error, unit, "candidates cannot be measured: the first is used");
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
