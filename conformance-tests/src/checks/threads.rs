//! Many threads at once, and things dropped in any order.

use super::{
    bench::{Bench, Given, Outcome, Stop, ensure, floats, open, same_bits},
    jobs::jobs,
    replay::joined,
};
use crate::{runner::TIMEOUT, subject::Subject, tensor::Tensor};
use dsrun_core::{
    DType,
    device::{BufferSlice, MemoryKind},
    op::Add,
};
use std::{sync::Barrier, thread};

const THREADS: usize = 8;

/// Eight threads plan, bind, enqueue, read back and drop, each on its own stream.
pub(super) fn eight(subject: &Subject) -> Outcome {
    floats(&**subject.device()).into_iter().try_for_each(|dtype| eight_of(subject, dtype))
}

fn eight_of(subject: &Subject, dtype: DType) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let jobs = jobs(&mut bench, dtype, 2)?;
    bench.wait()?;
    let start = Barrier::new(THREADS);
    let run = |index: usize| -> Outcome {
        let bench = Bench::new(subject.device());
        start.wait();
        let mut bench = bench?;
        for round in 0..4 {
            for job in 0..jobs.len() {
                let job = &jobs[(job + index) % jobs.len()];
                let set = (index + round) % 2;
                let plan = bench.plan(job.op.clone(), &job.operands[set])?;
                let bound = bench.bind(&plan, &job.operands[set])?;
                drop(plan);
                bench.enqueue(&bound)?;
                let found: Vec<Tensor> =
                    bound.results.iter().map(|held| bench.get(held)).collect::<Result<_, _>>()?;
                job.check("while seven other threads run", set, &found)?;
            }
        }
        Ok(())
    };
    let run = &run;
    let outcomes: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|index| scope.spawn(move || run(index))).collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
    });
    outcomes.into_iter().try_for_each(joined)
}

/// A stream may move to another thread between any two calls.
pub(super) fn moved(subject: &Subject) -> Outcome {
    floats(&**subject.device()).into_iter().try_for_each(|dtype| moved_of(subject, dtype))
}

fn moved_of(subject: &Subject, dtype: DType) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    for job in jobs(&mut bench, dtype, 1)? {
        let plan = bench.plan(job.op.clone(), &job.operands[0])?;
        let bound = bench.bind(&plan, &job.operands[0])?;
        let work = move || -> Result<(Bench, Vec<Tensor>), Stop> {
            bench.enqueue(&bound)?;
            let found = bound.results.iter().map(|held| bench.get(held)).collect::<Result<_, _>>()?;
            drop(bound);
            Ok((bench, found))
        };
        let result = thread::scope(|scope| scope.spawn(work).join());
        let result = result.unwrap_or_else(|_| Err(Stop::Failed("a thread panicked".into())));
        let (back, found) = result?;
        bench = back;
        job.check("on a stream that moved to another thread", 0, &found)?;
    }
    Ok(())
}

/// Children keep their parents alive: whatever is dropped first, what is left works.
pub(super) fn drop_order(subject: &Subject) -> Outcome {
    let dtype = floats(&**subject.device())[0];
    let (one, two) = (Tensor::floats(dtype, &[4, 9], &[1.0; 36]), Tensor::floats(dtype, &[4, 9], &[2.0; 36]));
    let three = Tensor::floats(dtype, &[4, 9], &[3.0; 36]);
    let sum = |bench: &mut Bench| -> Result<_, Stop> {
        let operands = [bench.give(&one)?, bench.give(&two)?, Given::Absent, Given::Absent];
        let plan = bench.plan(Add { alpha: 1.0 }, &operands)?;
        let bound = bench.bind(&plan, &operands)?;
        Ok((plan, operands, bound))
    };
    // Device, plan and operands go before the bound call runs; the bound call goes before its result is read.
    let device = open(subject, subject.options())?;
    let mut bench = Bench::new(&device)?;
    let (plan, operands, bound) = sum(&mut bench)?;
    let Bench { device: handle, stream } = bench;
    drop((handle, plan, operands));
    let result = bound.results[0].clone();
    let mut bench = Bench { device, stream };
    bench.enqueue(&bound)?;
    drop(bound);
    same_bits("a call whose plan and operands were dropped", &bench.get(&result)?, &three)?;

    // The stream goes before what ran on it; another one reads the result.
    let (plan, operands, bound) = sum(&mut bench)?;
    bench.enqueue(&bound)?;
    bench.wait()?;
    let Bench { device, stream } = bench;
    drop(stream);
    let mut bench = Bench::new(&device)?;
    same_bits("a result read on another stream", &bench.get(&bound.results[0])?, &three)?;
    drop((bound, operands, plan));

    // The device handle goes first of all; buffers and streams made from it live on.
    let (plan, operands, bound) = sum(&mut bench)?;
    let buffer = device.allocate(64, MemoryKind::Device)?;
    let event = device.event()?;
    let Bench { device: handle, mut stream } = bench;
    drop(handle);
    drop(device);
    bound.call.enqueue(&mut *stream)?;
    stream.record(&*event)?;
    event.synchronize("an event without its device", TIMEOUT)?;
    stream.fill(&BufferSlice::whole(buffer.clone()), 9)?;
    let mut bytes = [0; 64];
    let slice = BufferSlice::whole(buffer);
    stream.download(&slice, &mut bytes, "a buffer without its device", TIMEOUT)?;
    ensure(bytes == [9; 64], || "a buffer that outlives its device lost its bytes".into())?;
    let mut bytes = vec![0; bound.results[0].slice.bytes];
    stream.download(&bound.results[0].slice, &mut bytes, "a result without its device", TIMEOUT)?;
    ensure(bytes == three.bytes(), || "a call whose device handle was dropped gave something else".into())?;
    drop((operands, slice, plan, stream, bound));
    Ok(())
}
