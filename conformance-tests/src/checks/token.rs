//! From logits to a token and into the request table as one region, for one row.
//!
//! The region is held to its body op by op, to the bit: both have a request table of their own, over launches in which requests of
//! every kind take turns, and what one launch records is what the next one starts from. It runs in a graph.

use super::{
    bench::{Bench, Given, Held, Outcome, Stop, fail, floats, same_bits},
    sampling::table,
    tape::{Tape, Value},
};
use crate::{
    random::{Random, Values},
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    op::{CommitTokens, IN_PROMPT, LogitProcess, Sample, SamplingColumn},
};

/// Odd, and as many as some would take at a time or a few more.
const VOCABULARIES: [usize; 4] = [97, 4096, 4100, 20_003];

/// What is not as in the row before: greedy without penalties.
const KINDS: [&[(SamplingColumn, f64)]; 7] = [
    &[],
    &[(SamplingColumn::Temperature, 1.0)],
    &[(SamplingColumn::Temperature, 1.5), (SamplingColumn::TopK, 9.0)],
    &[(SamplingColumn::Temperature, 0.75), (SamplingColumn::TopP, 0.75)],
    &[(SamplingColumn::Temperature, 1.0), (SamplingColumn::MinP, 0.125)],
    &[(SamplingColumn::RepetitionPenalty, 1.25), (SamplingColumn::FrequencyPenalty, 0.5)],
    &[(SamplingColumn::Temperature, 1.0), (SamplingColumn::PresencePenalty, 0.5)],
];
const REQUESTS: usize = KINDS.len();

/// Requests and whose last token theirs becomes, launch by launch. -1: nobody's, or it is only reported.
const LAUNCHES: [(i32, i32); 14] = [
    (0, 0),
    (1, 1),
    (2, 2),
    (3, 3),
    (-1, -1),
    (4, 4),
    (5, 5),
    (5, 5),
    (6, 6),
    (6, -1),
    (0, 0),
    (-1, 3),
    (1, 1),
    (5, 5),
];

/// What changes from launch to launch, and what both tables have in common.
struct Row {
    logits: Held,
    request: Held,
    commit: Held,
    position: Held,
    /// Parameters, seeds, tokens that end a request, and bias and mask if there are any.
    fixed: [Given; 3],
    limits: [Given; 2],
}

/// The calls that sample into a request table of their own: processed logits, token, logarithm of its probability, and the columns
/// of the table are their results.
fn tape(bench: &mut Bench, row: &Row, counts: &Tensor) -> Result<(Tape, Vec<Value>), Stop> {
    let mut tape = Tape::default();
    let counts = tape.give(bench.give(counts)?);
    let [last, finished] = [-1, 0].map(|value| Tensor::vector(&[value; REQUESTS]));
    let (last, finished) = (tape.give(bench.give(&last)?), tape.give(bench.give(&finished)?));
    let [parameters, seeds, stop_ids] = row.fixed.clone().map(|given| tape.give(given));
    let [bias, mask] = row.limits.clone().map(|given| tape.give(given));
    let [logits, request, commit, position] =
        [&row.logits, &row.request, &row.commit, &row.position].map(|held| tape.give(held));
    let processed = tape.call(LogitProcess {}, [logits, request, parameters, counts, bias, mask]);
    let sampled = tape.call(Sample {}, [Some(processed[0]), request, position, parameters, seeds]);
    let committed = tape.call(CommitTokens {}, [commit, Some(sampled[0]), stop_ids, last, finished, counts]);
    Ok((tape, [processed, sampled, committed].concat()))
}

const RESULTS: [&str; 6] =
    ["processed", "the token", "its probability", "last tokens", "finished requests", "counts"];

fn of_vocabulary(bench: &mut Bench, dtype: DType, vocabulary: usize, limited: bool) -> Outcome {
    let device = bench.device.clone();
    let Some(graphs) = device.graphs() else {
        return Err(Stop::Unsupported("the device has no graphs".into()));
    };
    let mut random = Random::named(&format!("token/{dtype}/{vocabulary}/{limited}"));
    let words = vocabulary.div_ceil(32);
    let seeds: Vec<u32> = (0..2 * REQUESTS).map(|_| random.bits() as u32).collect();
    // Every token may end a request, in turns: one in a hundred does.
    let stop_ids: Vec<i32> = (0..vocabulary as i32).step_by(100).collect();
    let limits = if limited {
        let mask: Vec<u32> = (0..words).map(|_| random.bits() as u32).collect();
        let bias = random.tensor(DType::F32, &[REQUESTS, vocabulary], Values::Uniform);
        [bench.give(&bias)?, bench.give(&Tensor::words(&[1, words], &mask))?]
    } else {
        [Given::Absent, Given::Absent]
    };
    let mut one = || bench.empty(DType::I32, &[1]);
    let (request, commit, position) = (one()?, one()?, one()?);
    let row = Row {
        logits: bench.empty(dtype, &[1, vocabulary])?,
        request,
        commit,
        position,
        fixed: [
            bench.give(&table(&KINDS))?,
            bench.give(&Tensor::words(&[REQUESTS, 2], &seeds))?,
            bench.give(&Tensor::vector(&stop_ids))?,
        ],
        limits,
    };
    let counts: Vec<i32> = (0..REQUESTS * vocabulary)
        .map(|_| random.pick(&[0, 0, 0, 1, 2, IN_PROMPT, IN_PROMPT + 1, IN_PROMPT - 1]))
        .collect();
    let counts = Tensor::integers(&[REQUESTS, vocabulary], &counts);
    let (sampling, values) = tape(bench, &row, &counts)?;
    let bound = sampling.bind_region(bench, "the sampling of a row", &values)?;
    let (sampling, values) = tape(bench, &row, &counts)?;
    let (eager, places) = sampling.bind_each(bench)?;
    bench.wait()?;
    let results = bound.results;
    let graph = graphs.capture(&mut *bench.stream, vec![bound.call])?;

    for (launch, (request, commit)) in LAUNCHES.into_iter().enumerate() {
        let logits = random.tensor(dtype, &[1, vocabulary], Values::HeavyTailed);
        bench.set(&row.logits, &logits)?;
        for (held, value) in [(&row.request, request), (&row.commit, commit), (&row.position, launch as i32)]
        {
            bench.set(held, &Tensor::vector(&[value]))?;
        }
        eager.iter().try_for_each(|call| bench.enqueue(call))?;
        graph.launch(&mut *bench.stream)?;
        for ((what, found), value) in RESULTS.iter().zip(&results).zip(&values) {
            let Given::Tensor(expected) = &places[value.number()] else {
                return fail("a result is no tensor");
            };
            // A row that is skipped keeps what stood there.
            let (found, expected) = (bench.get(found)?, bench.get(expected)?);
            let what = format!("{dtype}, {vocabulary} tokens, launch {launch}: {what}");
            same_bits(&what, &found, &expected)?;
        }
    }
    Ok(())
}

/// The region that samples gives what its body gives, and leaves the same in the request table.
pub(super) fn region(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    for dtype in floats(&**subject.device()) {
        for vocabulary in VOCABULARIES {
            for limited in [false, true] {
                of_vocabulary(&mut bench, dtype, vocabulary, limited)?;
            }
        }
    }
    Ok(())
}
