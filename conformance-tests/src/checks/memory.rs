//! Memory: scratch is what was said, and what is dropped is given back.

use super::{
    bench::{Bench, During, Given, Outcome, Stop, ensure, fail, floats, open},
    jobs::{Job, jobs},
};
use crate::{runner::TIMEOUT, subject::Subject, tensor::Tensor};
use dsrun_core::{
    BytesReader, Code, DType, Error, WeightFormat, WeightType,
    checked::CheckedPlan,
    device::{BufferSlice, Device, DeviceOptions, MemoryKind},
    kernels::WeightDesc,
    op::Add,
};

/// In front of and behind scratch memory.
const CANARY: u8 = 0xA5;

fn planned(bench: &Bench, job: &Job) -> Result<CheckedPlan, Stop> {
    bench.plan(job.op.clone(), &job.operands[0])
}

/// A call runs in exactly the scratch memory that it asked for, whatever stands in it, touches nothing around it, and is
/// refused when it gets a byte less. What is asked for when a call is planned is what was said when it was queried.
pub(super) fn workspace(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    let alignment = bench.device.properties().alignment.max(1);
    for dtype in floats(&**subject.device()) {
        for job in jobs(&mut bench, dtype, 1)? {
            let name = format!("{}/{dtype}", job.name);
            let plan = planned(&bench, &job)?;
            let (said, needed) =
                (bench.support(&job.op, &job.operands[0])?.workspace_bytes, plan.workspace_bytes());
            ensure(needed <= said, || {
                format!("{name}: the plan needs {needed} bytes of workspace, the query said {said}")
            })?;
            let buffer = bench.buffer(alignment + needed + 64)?;
            let (all, slice) =
                (BufferSlice::whole(buffer.clone()), BufferSlice::new(buffer, alignment, needed)?);
            for byte in [0x00, 0xFF, 0x7F, 0x33] {
                bench.stream.fill(&all, CANARY)?;
                bench.stream.fill(&slice, byte)?;
                let bound = bench.bind_with(&plan, &job.operands[0], slice.clone())?;
                bench.enqueue(&bound)?;
                let found: Vec<Tensor> =
                    bound.results.iter().map(|held| bench.get(held)).collect::<Result<_, _>>()?;
                job.check(&format!("in a workspace full of {byte:#x}"), 0, &found)?;
                let mut around = vec![0; all.bytes];
                bench.stream.download(&all, &mut around, "a workspace", TIMEOUT)?;
                let outside = around[..alignment].iter().chain(&around[alignment + needed..]);
                ensure(outside.into_iter().all(|byte| *byte == CANARY), || {
                    format!("{name}: memory around the workspace was overwritten")
                })?;
            }
            if needed > 0 {
                let short = slice.slice(0, needed - 1)?;
                match bench.bind_with(&plan, &job.operands[0], short) {
                    Err(Stop::Failed(message)) if message.contains("workspace") => {}
                    Err(Stop::Failed(message) | Stop::Unsupported(message)) => {
                        return fail(format!("{name}: a short workspace is refused by {message:?}"));
                    }
                    Ok(_) => return fail(format!("{name}: a workspace a byte too short was accepted")),
                }
            }
        }
    }
    Ok(())
}

/// Two hundred enqueues hold no more memory than one.
pub(super) fn growth(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    for dtype in floats(&**subject.device()) {
        for job in jobs(&mut bench, dtype, 1)? {
            let plan = planned(&bench, &job)?;
            let bound = bench.bind(&plan, &job.operands[0])?;
            bench.enqueue(&bound)?;
            bench.wait()?;
            let before = bench.device.memory().used;
            for _ in 0..200 {
                bench.enqueue(&bound)?;
            }
            bench.wait()?;
            let after = bench.device.memory().used;
            ensure(after <= before, || {
                format!("{}/{dtype}: {} bytes more are held after 200 calls", job.name, after - before)
            })?;
        }
    }
    Ok(())
}

/// Makes one of everything, uses it, and drops it.
pub(super) fn everything(bench: &mut Bench) -> Outcome {
    let dtype = floats(&*bench.device)[0];
    let device = bench.device.clone();
    for job in jobs(bench, dtype, 1)? {
        let plan = planned(bench, &job)?;
        let bound = bench.bind(&plan, &job.operands[0])?;
        bench.enqueue(&bound)?;
        if let Some(graphs) = device.graphs() {
            let again = bench.bind(&plan, &job.operands[0])?;
            let graph = graphs.capture(&mut *bench.stream, vec![again.call])?;
            graph.launch(&mut *bench.stream)?;
        }
        let mut other = Bench::new(&device)?;
        let event = device.event()?;
        bench.stream.record(&*event)?;
        other.stream.wait(&*event)?;
        other.buffer(4096)?;
        other.wait()?;
    }
    bench.wait()
}

/// What is dropped is given back: buffers, streams, events, plans, bound calls, graphs, packed weights.
pub(super) fn given_back(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    // What a device makes once and keeps is made here.
    everything(&mut bench)?;
    let before = bench.device.memory().used;
    for _ in 0..5 {
        everything(&mut bench)?;
        let after = bench.device.memory().used;
        ensure(after <= before, || {
            format!("{} bytes are still held when everything was dropped", after - before)
        })?;
    }
    let held = bench.buffer(1 << 20)?;
    let with = bench.device.memory().used;
    ensure(with >= before + (1 << 20), || {
        format!("{} bytes more are said to be held with a buffer of a mebibyte", with - before)
    })?;
    drop(held);
    Ok(())
}

/// New memory is zero, also where something else was before.
pub(super) fn zeroed(subject: &Subject) -> Outcome {
    let mut bench = Bench::new(subject.device())?;
    for (kind, bytes) in [MemoryKind::Device, MemoryKind::Pinned]
        .into_iter()
        .flat_map(|kind| [1usize, 63, 4096, 1 << 20].map(|bytes| (kind, bytes)))
    {
        for round in 0..3 {
            let slice = BufferSlice::whole(bench.device.allocate(bytes, kind)?);
            let mut found = vec![1; bytes];
            bench.stream.download(&slice, &mut found, "new memory", TIMEOUT)?;
            ensure(found.iter().all(|byte| *byte == 0), || {
                format!("{bytes} bytes of {kind:?} memory are not zero when they are new (round {round})")
            })?;
            bench.stream.fill(&slice, 0xEE)?;
            bench.wait()?;
        }
    }
    Ok(())
}

/// A handle with a memory limit holds no more than that, says so when it is full, and goes on.
pub(super) fn limit(subject: &Subject) -> Outcome {
    const LIMIT: u64 = 8 << 20;
    let options = DeviceOptions { memory_limit: Some(LIMIT), ..subject.options().clone() };
    let device = open(subject, &options).during("open with a memory limit")?;
    let mut bench = Bench::new(&device)?;
    match device.allocate(LIMIT as usize * 2, MemoryKind::Device) {
        Ok(_) => return fail("twice the memory limit was allocated"),
        Err(error) => out_of_memory("beyond the memory limit", &error)?,
    }
    const PIECE: usize = LIMIT as usize / 16;
    for round in 0..2 {
        let mut pieces = Vec::new();
        loop {
            match device.allocate(PIECE, MemoryKind::Device) {
                Ok(piece) => pieces.push(piece),
                Err(error) => break out_of_memory("when the memory limit is reached", &error)?,
            }
            let held = (pieces.len() * PIECE) as u64;
            ensure(held <= LIMIT, || format!("{held} bytes are held under a memory limit of {LIMIT}"))?;
            let free = device.memory().free;
            ensure(free.is_none_or(|free| free <= LIMIT - held), || {
                format!("{free:?} bytes are free while {held} are held under a memory limit of {LIMIT}")
            })?;
        }
        ensure(pieces.len() >= 8, || {
            let held = pieces.len() * PIECE;
            format!("a handle with a memory limit of {LIMIT} gives only {held} bytes (round {round})")
        })?;
        pieces.pop();
        device.allocate(PIECE, MemoryKind::Device).during("an allocation in place of what was freed")?;
    }
    beyond_limit(&mut bench, LIMIT as usize)?;
    sum_is_right(&mut bench)
}

fn out_of_memory(when: &str, error: &Error) -> Outcome {
    ensure(error.code() == Code::OutOfMemory, || {
        format!("{when}, {} is reported: {error}", error.code().name())
    })
}

/// A weight that does not fit into the memory limit of a handle is refused.
fn beyond_limit(bench: &mut Bench, limit: usize) -> Outcome {
    let dtype = floats(&*bench.device)[0];
    let shape = vec![2 * limit / dtype.bytes() / 1024, 1024];
    let desc =
        WeightDesc { weight_type: WeightType { format: WeightFormat::Dense(dtype), shape }, immutable: true };
    let mut reader = BytesReader::new(desc.weight_type.clone(), vec![0; 2 * limit])?;
    match bench.device.kernels().prepack(&mut *bench.stream, &desc, &mut reader) {
        Ok(_) => fail("a weight of twice the memory limit was packed"),
        Err(error) => ensure([Code::OutOfMemory, Code::Unsupported].contains(&error.code()), || {
            format!("for a weight of twice the memory limit, {} is reported: {error}", error.code().name())
        }),
    }
}

/// Whether the device still computes: `1 + 2 = 3`.
pub(super) fn sum_is_right(bench: &mut Bench) -> Outcome {
    let dtype = floats(&*bench.device).first().copied().unwrap_or(DType::F32);
    let a = bench.give(&Tensor::floats(dtype, &[3, 5], &[1.0; 15]))?;
    let b = bench.give(&Tensor::floats(dtype, &[3, 5], &[2.0; 15]))?;
    let sum = bench.one(Add { alpha: 1.0 }, &[a, b, Given::Absent, Given::Absent]);
    let sum = sum.during("a sum afterwards")?;
    let found = bench.get(&sum).during("a sum afterwards")?.values();
    ensure(found.iter().all(|value| *value == 3.0), || {
        format!("afterwards the device says that 1 + 2 is {found:?}")
    })
}

/// What a handle held is given back when it is dropped: a new one starts from nothing.
pub(super) fn reopened(subject: &Subject) -> Outcome {
    let used = |device: &dyn Device| device.memory().used;
    let mut first = None;
    for _ in 0..4 {
        let device = open(subject, subject.options())?;
        let start = used(&*device);
        let expected = *first.get_or_insert(start);
        ensure(start <= expected, || {
            format!("a new handle of the device holds {start} bytes, the first one held {expected}")
        })?;
        let mut bench = Bench::new(&device)?;
        drop(device);
        sum_is_right(&mut bench)?;
    }
    Ok(())
}
