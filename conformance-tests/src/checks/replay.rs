//! The same call gives the same bits, wherever and however often it runs.

use super::{
    bench::{Bench, Bound, During, Given, Held, Outcome, Stop, ensure, fail, floats, same_bits},
    jobs::{Job, jobs},
};
use crate::{
    cases::drawn_weight,
    random::{Random, Values},
    runner::TIMEOUT,
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    DType, WeightFormat,
    checked::CheckedPlan,
    device::{BufferSlice, MemoryKind},
    op::{Add, Linear, Op, RmsNorm},
};
use std::{sync::Barrier, thread};

/// A norm between a sum and a product: three calls in a row, each reading what the one before wrote.
struct Chain {
    a: Held,
    others: [Given; 3],
    plans: [CheckedPlan; 3],
}

const SHAPE: [usize; 2] = [6, 128];

impl Chain {
    fn new(bench: &mut Bench, dtype: DType) -> Result<Self, Stop> {
        let mut random = Random::named(&format!("chain/{dtype}"));
        let a = bench.put(&random.tensor(dtype, &SHAPE, Values::Uniform))?;
        let b = bench.give(&random.tensor(dtype, &SHAPE, Values::Uniform))?;
        let norm = bench.give(&random.tensor(dtype, &SHAPE[1..], Values::Uniform))?;
        let weight = drawn_weight(&mut random, WeightFormat::Dense(dtype), [33, 128], 0.1);
        let weight = bench.pack(&weight)?;
        let given = Given::from(&a);
        let add =
            bench.plan(Add { alpha: 1.0 }, &[given.clone(), b.clone(), Given::Absent, Given::Absent])?;
        let rms_norm =
            bench.plan(RmsNorm { eps: 1e-5, weight_offset: 0.0 }, &[given.clone(), norm.clone()])?;
        let linear = bench.plan(Linear { dtype }, &[given, weight.clone(), Given::Absent])?;
        Ok(Self { a, others: [b, norm, weight], plans: [add, rms_norm, linear] })
    }

    /// Binds the calls to new results.
    fn bind(&self, bench: &mut Bench) -> Result<Vec<Bound>, Stop> {
        let [b, norm, weight] = self.others.clone();
        let sum = bench.bind(&self.plans[0], &[(&self.a).into(), b, Given::Absent, Given::Absent])?;
        let normed = bench.bind(&self.plans[1], &[(&sum.results[0]).into(), norm])?;
        let product = bench.bind(&self.plans[2], &[(&normed.results[0]).into(), weight, Given::Absent])?;
        Ok(vec![sum, normed, product])
    }
}

/// A graph that is launched again and again gives what the calls give one by one, each time of what is then in memory.
pub(super) fn graph(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let device = bench.device.clone();
    let Some(graphs) = device.graphs() else {
        return Err(Stop::Unsupported("the device has no graphs".into()));
    };
    for dtype in floats(&*device) {
        let chain = Chain::new(&mut bench, dtype)?;
        let (captured, eager) = (chain.bind(&mut bench)?, chain.bind(&mut bench)?);
        let results: Vec<Held> = captured.iter().map(|bound| bound.results[0].clone()).collect();
        let calls = captured.into_iter().map(|bound| bound.call).collect();
        bench.wait()?;
        let graph = graphs.capture(&mut *bench.stream, calls)?;
        bench.wait()?;
        let untouched = bench.get(&results[2])?;
        if untouched.bits.iter().any(|bits| *bits != untouched.bits[0]) {
            return fail("a call ran while it was captured");
        }
        let mut other = device.stream()?;
        let mut random = Random::named(&format!("graph/{dtype}"));
        for round in 0..4 {
            let a = random.tensor(dtype, &SHAPE, Values::HeavyTailed);
            bench.set(&chain.a, &a)?;
            eager.iter().try_for_each(|bound| bench.enqueue(bound))?;
            bench.wait()?;
            // The last round on a stream that the graph was not captured on.
            if round == 3 {
                graph.launch(&mut *other).during("launch on another stream")?;
                other.synchronize("a graph on another stream", TIMEOUT)?;
            } else {
                graph.launch(&mut *bench.stream).during("launch")?;
            }
            for (found, bound) in results.iter().zip(&eager) {
                let (found, expected) = (bench.get(found)?, bench.get(&bound.results[0])?);
                same_bits(&format!("{dtype}, launch {round} of the graph"), &found, &expected)?;
            }
        }
    }
    Ok(())
}

/// Where results go behind each launch: places that take turns, and others in between.
const PLACES: [usize; 16] = [0, 1, 0, 1, 0, 1, 2, 0, 3, 4, 5, 0, 5, 1, 1, 0];

/// What is copied to the host behind a launch of a graph is what this launch leaves: whole results and pieces, wherever they go.
pub(super) fn copies(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let device = bench.device.clone();
    let Some(graphs) = device.graphs() else {
        return Err(Stop::Unsupported("the device has no graphs".into()));
    };
    let dtype = floats(&*device)[0];
    let chain = Chain::new(&mut bench, dtype)?;
    let captured = chain.bind(&mut bench)?;
    let (product, sum) = (captured[2].results[0].slice.clone(), captured[0].results[0].slice.clone());
    let graph = graphs.capture(&mut *bench.stream, captured.into_iter().map(|bound| bound.call).collect())?;
    let eager = chain.bind(&mut bench)?;
    let mut places = Vec::new();
    for _ in 0..=PLACES.into_iter().max().unwrap_or(0) {
        places.push(BufferSlice::whole(device.allocate(sum.bytes.max(product.bytes), MemoryKind::Pinned)?));
    }
    let mut random = Random::named("copies behind a graph");
    for (round, place) in PLACES.into_iter().enumerate() {
        bench.set(&chain.a, &random.tensor(dtype, &SHAPE, Values::HeavyTailed))?;
        eager.iter().try_for_each(|bound| bench.enqueue(bound))?;
        // Of the later rounds some copy a piece, or what an earlier call of the graph left, or two things.
        let (source, expected) = match round {
            9 | 15 => (sum.clone(), &eager[0].results[0]),
            10 => (product.slice(product.bytes / 2 / 4 * 4, 8)?, &eager[2].results[0]),
            _ => (product.clone(), &eager[2].results[0]),
        };
        let to = places[place].slice(0, source.bytes)?;
        graph.launch(&mut *bench.stream).during("launch")?;
        bench.stream.copy(&source, &to).during("copy to the host")?;
        if round == 12 {
            bench
                .stream
                .copy(&source, &places[0].slice(0, source.bytes)?)
                .during("second copy to the host")?;
        }
        let done = device.event()?;
        bench.stream.record(&*done)?;
        done.synchronize("a copy behind a graph", TIMEOUT)?;
        let mut found = vec![0; to.bytes];
        match to.buffer.host_pointer() {
            // SAFETY: a slice lies inside its buffer, and the event behind the only work that writes to it was reached.
            Some(from) => unsafe {
                from.as_ptr().add(to.offset).copy_to_nonoverlapping(found.as_mut_ptr(), found.len());
            },
            None => bench.stream.download(&to, &mut found, "a copy behind a graph", TIMEOUT)?,
        }
        let first = source.offset - if round == 9 || round == 15 { sum.offset } else { product.offset };
        let expected = bench.get(expected)?.bytes();
        ensure(found == expected[first..first + found.len()], || {
            format!("{dtype}, launch {round}: the host has something else than the launch left")
        })?;
    }
    Ok(())
}

fn results(bench: &mut Bench, bound: &Bound) -> Result<Vec<Tensor>, Stop> {
    bound.results.iter().map(|held| bench.get(held)).collect()
}

fn plan(bench: &Bench, job: &Job) -> Result<CheckedPlan, Stop> {
    bench.plan(job.op.clone(), &job.operands[0])
}

/// A plan gives the same bits on another stream and on another thread.
pub(super) fn elsewhere(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    for dtype in floats(&**subject.device()) {
        for job in jobs(&mut bench, dtype, 1)? {
            let plan = plan(&bench, &job)?;
            let mut other = Bench::new(subject.device())?;
            bench.wait()?;
            let bound = other.bind(&plan, &job.operands[0])?;
            other.enqueue(&bound)?;
            job.check("on another stream", 0, &results(&mut other, &bound)?)?;
            let run = || -> Outcome {
                let mut other = Bench::new(subject.device())?;
                let bound = other.bind(&plan, &job.operands[0])?;
                other.enqueue(&bound)?;
                job.check("on another thread", 0, &results(&mut other, &bound)?)
            };
            joined(thread::scope(|scope| scope.spawn(run).join()))?;
        }
    }
    Ok(())
}

/// What came of a thread.
pub(super) fn joined(result: thread::Result<Outcome>) -> Outcome {
    result.unwrap_or_else(|_| fail("a thread panicked"))
}

/// How often the calls of two streams run next to each other.
const ROUNDS: usize = 24;

/// Two bound calls of one plan, at once on two streams, do not disturb each other: scratch memory and whatever a plan keeps
/// belong to the binding.
pub(super) fn side_by_side(subject: &Subject) -> Outcome {
    floats(&**subject.device()).into_iter().try_for_each(|dtype| side_by_side_of(subject, dtype))
}

fn side_by_side_of(subject: &Subject, dtype: DType) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    for job in jobs(&mut bench, dtype, 2)? {
        let plan = plan(&bench, &job)?;
        bench.wait()?;
        // By turns from one thread, without waiting in between: devices that run later overlap here.
        let mut benches = [Bench::new(subject.device())?, Bench::new(subject.device())?];
        let bound = [0, 1].map(|set| benches[set].bind(&plan, &job.operands[set]));
        let [first, second] = bound;
        let bound = [first?, second?];
        for _ in 0..ROUNDS {
            for set in [0, 1] {
                benches[set].enqueue(&bound[set])?;
            }
        }
        for set in [0, 1] {
            let found = results(&mut benches[set], &bound[set])?;
            job.check("by turns with another on a second stream", set, &found)?;
        }
        // From two threads: devices that run at once overlap here.
        let start = Barrier::new(2);
        let run = |mut bench: Bench, set: usize, bound: Bound| {
            start.wait();
            for _ in 0..ROUNDS {
                bound.results.iter().try_for_each(|held| bench.stream.fill(&held.slice, 0xFF))?;
                bench.enqueue(&bound)?;
                let found = results(&mut bench, &bound)?;
                job.check("at the same time as another on a second stream", set, &found)?;
            }
            Ok(())
        };
        let run = &run;
        let outcomes: Vec<_> = thread::scope(|scope| {
            let both = benches.into_iter().zip(bound).enumerate();
            let threads: Vec<_> =
                both.map(|(set, (bench, bound))| scope.spawn(move || run(bench, set, bound))).collect();
            threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
        });
        outcomes.into_iter().try_for_each(joined)?;
    }
    Ok(())
}

/// Plans of one op that differ in an attribute live next to each other: a later one does not take an earlier one's place.
pub(super) fn plans(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    for dtype in floats(&**subject.device()) {
        let mut random = Random::named(&format!("plans/{dtype}"));
        let a = bench.give(&random.tensor(dtype, &SHAPE, Values::Uniform))?;
        let b = bench.give(&random.tensor(dtype, &SHAPE, Values::Uniform))?;
        let weight = bench.give(&random.tensor(dtype, &SHAPE[1..], Values::Uniform))?;
        let (sum, norm) = ([a.clone(), b, Given::Absent, Given::Absent], [a, weight]);
        let calls: Vec<(Op, &[Given])> = vec![
            (Add { alpha: 1.0 }.into(), &sum),
            (Add { alpha: -2.0 }.into(), &sum),
            (RmsNorm { eps: 1e-5, weight_offset: 0.0 }.into(), &norm),
            (RmsNorm { eps: 1e-5, weight_offset: 1.0 }.into(), &norm),
        ];
        let mut alone = Vec::new();
        for (op, operands) in &calls {
            let result = bench.one(op.clone(), operands)?;
            alone.push(bench.get(&result)?);
        }
        let mut plans = Vec::new();
        for (op, operands) in &calls {
            plans.push(bench.plan(op.clone(), operands)?);
        }
        let mut bound = Vec::new();
        for (plan, (_, operands)) in plans.iter().zip(&calls) {
            bound.push(bench.bind(plan, operands)?);
        }
        bound.iter().try_for_each(|bound| bench.enqueue(bound))?;
        for ((bound, expected), (op, _)) in bound.iter().zip(&alone).zip(&calls) {
            let found = bench.get(&bound.results[0])?;
            same_bits(&format!("{}/{dtype} next to other plans", op.name()), &found, expected)?;
        }
    }
    Ok(())
}
