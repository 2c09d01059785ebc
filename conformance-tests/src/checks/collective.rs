//! Ranks: what happens when one does not come, and a layer that is shared out. What collectives compute is for the cases.

use super::{
    bench::{Bench, During, Given, Outcome, Stop, ensure, fail, floats, near},
    memory::sum_is_right,
    replay::joined,
};
use crate::{
    case::Weight,
    gate::Gate,
    oracle::linear,
    random::{Random, Values},
    runner::TIMEOUT,
    subject::Subject,
    tensor::Tensor,
};
use dsrun_core::{
    Code, DType, Error, WeightFormat, WeightType,
    collective::{Collective, Comm, GroupId},
    device::Device,
    graph::{CallList, Graph},
    op::{AllGather, AllReduce, Cast, Linear, MeshAxis, Reduction},
};
use std::{sync::Arc, thread, time::Duration};

/// What a rank says that cannot go on.
const GIVEN_UP: &str = "a rank of a check has failed";

pub(super) const SUM: AllReduce = AllReduce { axis: MeshAxis::Tensor, reduction: Reduction::Sum };

fn collective(device: &dyn Device) -> Result<&dyn Collective, Stop> {
    device.collective().ok_or_else(|| Stop::Unsupported("the device has no collectives".into()))
}

/// Devices for ranks, and the name of a group for them.
pub(super) fn group(subject: &Subject, ranks: usize) -> Result<(Vec<Arc<dyn Device>>, GroupId), Stop> {
    let devices = subject.ranks(ranks)?;
    let id = collective(&*devices[0])?.group_id(None)?;
    Ok((devices, id))
}

/// Runs every rank on a thread of its own.
pub(super) fn on_ranks(
    devices: &[Arc<dyn Device>],
    id: &GroupId,
    rank: impl Fn(usize, &Arc<dyn Device>, Arc<dyn Comm>) -> Outcome + Sync,
) -> Outcome {
    let rank = &rank;
    let outcomes: Vec<_> = thread::scope(|scope| {
        let run = |index: usize| {
            let device = &devices[index];
            let comm = collective(&**device)?.join(id, index, devices.len(), TIMEOUT)?;
            let outcome = rank(index, device, comm.clone());
            if outcome.is_err() {
                comm.abort(GIVEN_UP);
            }
            outcome
        };
        let threads: Vec<_> = (0..devices.len()).map(|index| scope.spawn(move || run(index))).collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
    });
    // The rank that failed first is the one to hear: the others only say that they were woken.
    let woken = |outcome: &Outcome| matches!(outcome, Err(Stop::Failed(why)) if why.contains(GIVEN_UP));
    let (woken, own): (Vec<Outcome>, Vec<Outcome>) = outcomes.into_iter().map(joined).partition(woken);
    own.into_iter().chain(woken).collect()
}

/// The ranks add up to what they must: `1 + 2 + ..`.
fn adds_up(subject: &Subject, ranks: usize) -> Outcome {
    let (devices, id) = group(subject, ranks)?;
    let dtype = floats(&*devices[0])[0];
    on_ranks(&devices, &id, |rank, device, comm| {
        let mut bench = Bench::new(device)?;
        let x = bench.give(&Tensor::floats(dtype, &[2, 3], &[rank as f64 + 1.0; 6]))?;
        let plan = bench.plan_over(SUM, std::slice::from_ref(&x), Some(comm.clone()))?;
        let bound = bench.bind(&plan, &[x])?;
        bench.enqueue(&bound)?;
        let found = bench.get(&bound.results[0])?.values();
        comm.status()?;
        let expected = (ranks * (ranks + 1) / 2) as f64;
        ensure(found.iter().all(|value| *value == expected), || {
            format!("rank {rank} of {ranks} has {found:?}, not {expected}")
        })
    })
}

/// What a rank was told by a group that failed.
fn told(bench: &mut Bench, enqueued: Outcome, comm: &dyn Comm) -> Option<String> {
    let waited = bench.stream.synchronize("a collective that was aborted", TIMEOUT).map_err(Stop::from);
    let status = comm.status().map_err(Stop::from);
    let said = [enqueued, waited, status].into_iter().find_map(Result::err);
    said.map(|(Stop::Failed(said) | Stop::Unsupported(said))| said)
}

/// A rank that aborts the group wakes those that wait in it, with its reason; the devices work on.
pub(super) fn abort(subject: &Subject) -> Outcome {
    const REASON: &str = "the check pulls the plug";
    // The group ends at its first collective, or later.
    for (ranks, before) in [(2, 0), (3, 0), (2, 2), (3, 1)] {
        let (devices, id) = group(subject, ranks)?;
        let dtype = floats(&*devices[0])[0];
        on_ranks(&devices, &id, |rank, device, comm| {
            let mut bench = Bench::new(device)?;
            let x = bench.give(&Tensor::floats(dtype, &[2, 3], &[1.0; 6]))?;
            let plan = bench.plan_over(SUM, std::slice::from_ref(&x), Some(comm.clone()))?;
            let bound = bench.bind(&plan, &[x])?;
            for _ in 0..before {
                bench.enqueue(&bound)?;
                bench.wait()?;
            }
            if rank == 0 {
                // Late enough that the others wait by then; if they do not, they must be told when they come.
                thread::sleep(Duration::from_millis(50));
                comm.abort(REASON);
                return Ok(());
            }
            let enqueued = bench.enqueue(&bound);
            match told(&mut bench, enqueued, &*comm) {
                None => fail(format!("rank {rank} of {ranks} was not told that the group was aborted")),
                Some(said) => ensure(said.contains(REASON), || {
                    format!("rank {rank} of {ranks} was told {said:?}, not the reason of the abort")
                }),
            }
        })?;
    }
    adds_up(subject, 2).during("a new group after an aborted one")
}

/// A rank that does not come is missed within the time that was set, by its number; the process and the device live.
pub(super) fn missing(subject: &Subject) -> Outcome {
    let (devices, id) = group(subject, 1)?;
    let joined = collective(&*devices[0])?.join(&id, 0, 2, Duration::from_millis(200));
    let error: Error = match joined {
        Ok(_) => return fail("a group of two was joined by one"),
        Err(error) => error,
    };
    ensure(error.code() == Code::Timeout, || format!("a missing rank is no timeout: {error}"))?;
    ensure(error.message().contains('1'), || format!("the missing rank, 1, is not named: {error}"))?;
    sum_is_right(&mut Bench::new(&devices[0])?)?;
    adds_up(subject, 2).during("a new group after one that did not gather")
}

/// Ranks that cannot be.
pub(super) fn ranks(subject: &Subject) -> Outcome {
    let (devices, id) = group(subject, 1)?;
    let collective = collective(&*devices[0])?;
    let invalid = &[Code::InvalidArgument];
    for (rank, ranks) in [(2, 2), (0, 0), (usize::MAX, 2)] {
        let joined = collective.join(&id, rank, ranks, Duration::from_millis(100));
        super::faults::refused(&format!("rank {rank} of {ranks}"), joined, invalid)?;
    }
    for ranks in 1..=4 {
        adds_up(subject, ranks).during(&format!("{ranks} ranks"))?;
    }
    Ok(())
}

/// Rows, outputs and inputs of the layer that is shared out.
const LAYER: [usize; 3] = [5, 24, 96];

/// A linear layer cut along its inputs, its partial sums added up by an all-reduce, is the whole layer on every rank.
pub(super) fn sharded(subject: &Subject) -> Outcome {
    let [m, n, k] = LAYER;
    for ranks in [2, 3, 4] {
        let (devices, id) = group(subject, ranks)?;
        let dtype = floats(&*devices[0])[0];
        let mut random = Random::named(&format!("sharded/{ranks}"));
        let x = random.tensor(dtype, &[m, k], Values::Uniform);
        let weight = random.scaled(dtype, &[n, k], Values::HeavyTailed, 0.1);
        let reals = linear::linear(&x.values(), &weight.values(), None, LAYER);
        let share = k / ranks;
        on_ranks(&devices, &id, |rank, device, comm| {
            let mut bench = Bench::new(device)?;
            let columns = |tensor: &Tensor| {
                let rows = tensor.bits.chunks(k).flat_map(|row| row[rank * share..][..share].iter().copied());
                let bits = rows.collect();
                Tensor { shape: vec![tensor.shape[0], share], bits, ..tensor.clone() }
            };
            let (x, part) = (bench.give(&columns(&x))?, columns(&weight));
            let weight_type = WeightType { format: WeightFormat::Dense(dtype), shape: vec![n, share] };
            let part = Weight { weight_type, bytes: part.bytes() };
            let part = bench.pack(&part)?;
            let y = bench.one(Linear { dtype: DType::F32 }, &[x, part, Given::Absent])?;
            let operands = [Given::from(&y)];
            let plan = bench.plan_over(SUM, &operands, Some(comm))?;
            let bound = bench.bind(&plan, &operands)?;
            bench.enqueue(&bound)?;
            let sum = bench.get(&y)?;
            near("a layer over ranks", Gate::default(), &reals, &[(&format!("rank {rank} of {ranks}"), &sum)])
        })?;
    }
    Ok(())
}

/// How often a graph with collectives is launched.
const LAUNCHES: usize = 40;

/// Shapes of tensors that take different ways through a backend.
const REPLAYED: [[usize; 2]; 4] = [[1, 3], [4, 2048], [33, 1031], [512, 1024]];

/// Graphs with collectives give, launch after launch and with ranks that come at different times, the sums of what is then in memory.
pub(super) fn replayed(subject: &Subject) -> Outcome {
    for (ranks, shape) in [2, 3].into_iter().flat_map(|ranks| REPLAYED.map(|shape| (ranks, shape))) {
        let (devices, id) = group(subject, ranks)?;
        on_ranks(&devices, &id, |rank, device, comm| {
            replay(rank, device, &comm, shape).during(&format!("rank {rank} of {ranks}, {shape:?}"))
        })?;
    }
    Ok(())
}

fn replay(rank: usize, device: &Arc<dyn Device>, comm: &Arc<dyn Comm>, shape: [usize; 2]) -> Outcome {
    let (mut bench, ranks) = (Bench::new(device)?, comm.ranks());
    let x = bench.empty(DType::F32, &shape)?;
    let given = [Given::from(&x)];
    let copy = bench.plan(Cast { dtype: DType::F32 }, &given)?;
    let copy = bench.bind(&copy, &given)?;
    let summed = [Given::from(&copy.results[0])];
    let sum = bench.plan_over(SUM, &summed, Some(comm.clone()))?;
    let sum = bench.bind(&sum, &summed)?;
    let gather = AllGather { axis: MeshAxis::Tensor, ranks: ranks as u32, rows: true };
    let gather = bench.plan_over(gather, &given, Some(comm.clone()))?;
    let gather = bench.bind(&gather, &given)?;
    let found = [sum.results[0].clone(), gather.results[0].clone()];
    bench.wait()?;
    let calls: Vec<_> = [copy, sum, gather].into_iter().map(|bound| bound.call).collect();
    let graph: Box<dyn Graph> = match device.graphs() {
        Some(graphs) => graphs.capture(&mut *bench.stream, calls)?,
        None => Box::new(CallList::new(calls)),
    };
    // Small whole numbers, so that sums are exact.
    let number = |launch: usize, rank: usize, index: usize| ((launch * 7 + rank * 3 + index) % 61) as f64;
    let count = shape[0] * shape[1];
    let tensor = |launch: usize, rank: usize| (0..count).map(move |index| number(launch, rank, index));
    let mut random = Random::named(&format!("replayed/{rank}"));
    for launch in 0..LAUNCHES {
        bench.set(&x, &Tensor::floats(DType::F32, &shape, &tensor(launch, rank).collect::<Vec<_>>()))?;
        thread::sleep(Duration::from_micros(random.below(300) as u64));
        graph.launch(&mut *bench.stream)?;
        let [sum, gathered] = [bench.get(&found[0])?.values(), bench.get(&found[1])?.values()];
        let total = |index: usize| (0..ranks).map(|rank| number(launch, rank, index)).sum::<f64>();
        ensure(sum.iter().enumerate().all(|(index, sum)| *sum == total(index)), || {
            format!("launch {launch} has a wrong sum")
        })?;
        let expected = (0..ranks).flat_map(|rank| tensor(launch, rank));
        ensure(gathered.into_iter().eq(expected), || format!("launch {launch} has gathered something else"))?;
    }
    Ok(comm.status()?)
}
