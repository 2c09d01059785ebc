//! Collectives, over 1 to 4 ranks.

use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand},
    oracle::collective::{Reduced, reduce},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    op::{
        AllGather, AllReduce, AllToAll, Barrier, Broadcast, MeshAxis, Op, Receive, ReduceScatter, Reduction,
        Send,
    },
};

const AXIS: MeshAxis = MeshAxis::Tensor;

/// Label, rows and features; both are multiplied by the ranks where an op shares them out. Rows that are not real are
/// still sent by some, so extents are left alone here.
const SHAPES: &[(&str, usize, usize)] =
    &[("nothing", 0, 8), ("one", 1, 1), ("odd", 7, 33), ("large", 61, 257)];

/// The tensor of every rank.
fn tensors(
    random: &mut Random,
    dtype: DType,
    ranks: usize,
    shape: [usize; 2],
    values: Values,
) -> Vec<Tensor> {
    let one = |random: &mut Random| {
        if dtype.is_float() {
            return random.tensor(dtype, &shape, values);
        }
        // Small enough that no sum leaves the type.
        let small = |random: &mut Random| match dtype {
            DType::U8 => random.below(60) as u32,
            DType::U32 => random.below(1 << 29) as u32,
            DType::I8 => (random.below(60) as i32 - 30) as u32 & 0xFF,
            _ => (random.below(1 << 28) as i32 - (1 << 27)) as u32,
        };
        let bits = (0..shape[0] * shape[1]).map(|_| small(random)).collect();
        Tensor { dtype, shape: shape.to_vec(), bits }
    };
    (0..ranks).map(|_| one(random)).collect()
}

fn combined(dtype: DType, reduction: Reduction, tensors: &[Tensor], at: usize) -> Element {
    let ranks: Vec<u32> = tensors.iter().map(|tensor| tensor.bits[at]).collect();
    match reduce(dtype, reduction, &ranks) {
        Reduced::Bits(bits) => Element::Bits(bits),
        Reduced::Float(real) => Element::Real(real),
    }
}

/// Every size and number of ranks, with a stream of its own.
fn each(op: &str, dtype: DType, mut make: impl FnMut(String, Random, usize, [usize; 2], usize)) {
    for ranks in 1..=4 {
        for (number, (label, rows, features)) in SHAPES.iter().enumerate() {
            let id = format!("{op}/{dtype}/{label}_over_{ranks}");
            let random = Random::named(&id);
            make(id, random, ranks, [*rows, *features], number);
        }
    }
}

fn case(id: String, calls: Vec<CallCase>) -> Case {
    Case { id, calls, alike: false }
}

fn reductions(dtype: DType) -> impl Iterator<Item = Reduction> {
    Reduction::ALL.iter().copied().filter(move |reduction| *reduction != Reduction::Mean || dtype.is_float())
}

fn inner(dtype: DType) -> crate::gate::Gate {
    crate::gate::Gate { inner: dtype.is_float().then_some(dtype), exponential: false }
}

pub(super) fn all_reduce(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for reduction in reductions(dtype) {
        each(&format!("all_reduce_{}", reduction.name()), dtype, |id, mut random, ranks, shape, number| {
            let all = tensors(&mut random, dtype, ranks, shape, Values::USUAL[number % 3]);
            let layout = Layout::strided(if number == 2 { 3 } else { 0 }, 0);
            let elements = (0..all[0].bits.len()).map(|at| combined(dtype, reduction, &all, at));
            let expected = Expected::new(elements.collect()).gated(inner(dtype));
            let call = |x: &Tensor| {
                let op = AllReduce { axis: AXIS, reduction };
                CallCase::new(op, vec![Operand::laid(x.clone(), layout)], vec![expected.clone()])
            };
            cases.push(Case { id, calls: all.iter().map(call).collect(), alike: true });
        });
    }
    cases
}

pub(super) fn all_gather(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for rows in [false, true] {
        let name = if rows { "all_gather_rows" } else { "all_gather" };
        each(name, dtype, |id, mut random, ranks, shape, number| {
            let all = tensors(&mut random, dtype, ranks, shape, Values::Special);
            let gathered: Vec<u32> = if rows {
                all.iter().flat_map(|tensor| tensor.bits.iter().copied()).collect()
            } else {
                let row = |row: usize| {
                    all.iter()
                        .flat_map(move |tensor| tensor.bits[row * shape[1]..][..shape[1]].iter().copied())
                };
                (0..shape[0]).flat_map(row).collect()
            };
            let layout = Layout::strided(if number == 2 { 3 } else { 0 }, 0);
            let expected = Expected::bits(gathered).laid(layout, 1);
            let call = |x: &Tensor| {
                let op = AllGather { axis: AXIS, ranks: ranks as u32, rows };
                CallCase::new(op, vec![Operand::laid(x.clone(), layout)], vec![expected.clone()])
            };
            cases.push(Case { id, calls: all.iter().map(call).collect(), alike: true });
        });
    }
    cases
}

pub(super) fn reduce_scatter(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, reduction) in
        [false, true].into_iter().flat_map(|rows| reductions(dtype).map(move |r| (rows, r)))
    {
        let name = format!("reduce_scatter_{}{}", reduction.name(), if rows { "_rows" } else { "" });
        each(&name, dtype, |id, mut random, ranks, [mut height, mut width], number| {
            let share = if rows { &mut height } else { &mut width };
            let kept = *share;
            *share *= ranks;
            let all = tensors(&mut random, dtype, ranks, [height, width], Values::USUAL[number % 3]);
            let layout = Layout::strided(if number == 2 { 3 } else { 0 }, 0);
            let call = |(rank, x): (usize, &Tensor)| {
                let mine = |at: &usize| (if rows { at / width } else { at % width }) / kept == rank;
                let elements = (0..x.bits.len()).filter(mine).map(|at| combined(dtype, reduction, &all, at));
                let expected = Expected::new(elements.collect()).gated(inner(dtype)).laid(layout, 1);
                let op = ReduceScatter { axis: AXIS, ranks: ranks as u32, rows, reduction };
                CallCase::new(op, vec![Operand::laid(x.clone(), layout)], vec![expected])
            };
            cases.push(case(id, all.iter().enumerate().map(call).collect()));
        });
    }
    cases
}

pub(super) fn all_to_all(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    each("all_to_all", dtype, |id, mut random, ranks, [rows, width], number| {
        let all = tensors(&mut random, dtype, ranks, [rows * ranks, width], Values::Special);
        let layout = Layout::strided(if number == 2 { 3 } else { 0 }, 0);
        let block = rows * width;
        let call = |(rank, x): (usize, &Tensor)| {
            let from = |other: &Tensor| other.bits[rank * block..][..block].to_vec();
            let expected = Expected::bits(all.iter().flat_map(from)).laid(layout, 1);
            let op = AllToAll { axis: AXIS, ranks: ranks as u32 };
            CallCase::new(op, vec![Operand::laid(x.clone(), layout)], vec![expected])
        };
        cases.push(case(id, all.iter().enumerate().map(call).collect()));
    });
    cases
}

pub(super) fn broadcast(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    each("broadcast", dtype, |id, mut random, ranks, shape, number| {
        let all = tensors(&mut random, dtype, ranks, shape, Values::Special);
        let root = random.below(ranks);
        let layout = Layout::strided(if number == 2 { 3 } else { 0 }, 0);
        let expected = Expected::bits(all[root].bits.iter().copied());
        let call = |x: &Tensor| {
            let op = Broadcast { axis: AXIS, root: root as u32 };
            CallCase::new(op, vec![Operand::laid(x.clone(), layout)], vec![expected.clone()])
        };
        cases.push(Case { id, calls: all.iter().map(call).collect(), alike: true });
    });
    cases
}

/// Even ranks send to the odd ones behind them.
pub(super) fn send_and_receive(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    each("send", dtype, |id, mut random, ranks, shape, number| {
        if ranks % 2 == 1 {
            return;
        }
        let all = tensors(&mut random, dtype, ranks, shape, Values::Special);
        let layout = Layout::strided(if number == 2 { 3 } else { 0 }, 0);
        let call = |rank: usize| {
            let operands = vec![Operand::laid(all[rank].clone(), layout)];
            if rank.is_multiple_of(2) {
                return CallCase::new(Send { axis: AXIS, peer: rank as u32 + 1 }, operands, Vec::new());
            }
            let expected = Expected::bits(all[rank - 1].bits.iter().copied());
            CallCase::new(Receive { axis: AXIS, peer: rank as u32 - 1 }, operands, vec![expected])
        };
        cases.push(case(id, (0..ranks).map(call).collect()));
    });
    cases
}

pub(super) fn barrier(dtype: DType) -> Vec<Case> {
    let call = || CallCase::new(Op::from(Barrier { axis: AXIS }), Vec::new(), Vec::new());
    (1..=4)
        .map(|ranks| case(format!("barrier/{dtype}/over_{ranks}"), (0..ranks).map(|_| call()).collect()))
        .collect()
}
