//! Cases of collectives, over 1 to 4 ranks.

use super::wanted::is_wanted;
use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand},
    draw::Draw,
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

/// Label, rows and features of each case; ops that distribute rows or features multiply them by the number of ranks. Extents are
/// not used, because some ops send rows past them.
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
        // Small enough that no sum overflows.
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

/// A group of ranks.
struct Group {
    id: String,
    random: Random,
    ranks: usize,
    shape: [usize; 2],
    layout: Layout,
    /// Tensors to reduce. Tensors to copy have special values as well.
    values: Values,
}

impl Group {
    fn copied(&mut self, dtype: DType, shape: [usize; 2]) -> Vec<Tensor> {
        tensors(&mut self.random, dtype, self.ranks, shape, Values::Special)
    }

    fn reduced(&mut self, dtype: DType, shape: [usize; 2]) -> Vec<Tensor> {
        tensors(&mut self.random, dtype, self.ranks, shape, self.values)
    }
}

/// Cases for every size and number of ranks, each with its own random stream.
fn each(op: &str, dtype: DType, make: impl Fn(Group) -> Case) -> Vec<Case> {
    each_over(&[1, 2, 3, 4], op, dtype, make)
}

/// Same as [`each`], for some numbers of ranks.
fn each_over(numbers: &[usize], op: &str, dtype: DType, make: impl Fn(Group) -> Case) -> Vec<Case> {
    let mut cases = Vec::new();
    for ranks in numbers.iter().copied() {
        for (number, (label, rows, features)) in SHAPES.iter().enumerate() {
            let id = format!("{op}/{dtype}/{label}_over_{ranks}");
            if !is_wanted(&id) {
                continue;
            }
            cases.push(make(Group {
                random: Random::named(&id),
                id,
                ranks,
                shape: [*rows, *features],
                layout: Layout::strided(if number == 2 { 3 } else { 0 }, 0),
                values: Values::USUAL[number % 3],
            }));
        }
    }
    cases
}

fn drawn_group(draw: &mut Draw) -> Group {
    Group {
        id: draw.id(),
        random: draw.values(),
        ranks: draw.pick(&[2, 1, 3, 4]),
        shape: [draw.pick(&[1, 0, 2, 7, 16, 17, 61]), draw.pick(&[1, 2, 7, 31, 32, 33, 128, 257])],
        layout: Layout::strided(draw.pick(&[0, 3, 8]), draw.below(3)),
        values: draw.pick(&Values::USUAL),
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
    let of = |reduction: Reduction| {
        let name = format!("all_reduce_{}", reduction.name());
        each(&name, dtype, |group| all_reduce_case(dtype, reduction, group))
    };
    reductions(dtype).flat_map(of).chain(vast_sums(dtype)).collect()
}

/// Sums of 8 MiB, which backends compute by other algorithms than small ones, in several pieces.
fn vast_sums(dtype: DType) -> Vec<Case> {
    if dtype != DType::F32 {
        return Vec::new();
    }
    let sum = |ranks: usize| {
        let id = format!("all_reduce_sum/{dtype}/vast_over_{ranks}");
        let (random, shape) = (Random::named(&id), [2053, 1049]);
        let (layout, values) = (Layout::strided(0, 0), Values::USUAL[0]);
        let group = Group { id, random, ranks, shape, layout, values };
        is_wanted(&group.id).then(|| all_reduce_case(dtype, Reduction::Sum, group))
    };
    [2, 3].into_iter().filter_map(sum).collect()
}

pub(super) fn drawn_all_reduce(dtype: DType, draw: &mut Draw) -> Case {
    let reduction = draw.pick(&reductions(dtype).collect::<Vec<_>>());
    all_reduce_case(dtype, reduction, drawn_group(draw))
}

fn all_reduce_case(dtype: DType, reduction: Reduction, mut group: Group) -> Case {
    let all = group.reduced(dtype, group.shape);
    let elements = (0..all[0].bits.len()).map(|at| combined(dtype, reduction, &all, at));
    let expected = Expected::new(elements.collect()).gated(inner(dtype));
    let call = |x: &Tensor| {
        let op = AllReduce { axis: AXIS, reduction };
        CallCase::new(op, vec![Operand::laid(x.clone(), group.layout)], vec![expected.clone()])
    };
    Case { calls: all.iter().map(call).collect(), id: group.id, alike: true }
}

pub(super) fn all_gather(dtype: DType) -> Vec<Case> {
    let of = |rows: bool| {
        let name = if rows { "all_gather_rows" } else { "all_gather" };
        each(name, dtype, |group| all_gather_case(dtype, rows, group))
    };
    [false, true].into_iter().flat_map(of).collect()
}

pub(super) fn drawn_all_gather(dtype: DType, draw: &mut Draw) -> Case {
    let rows = draw.sometimes();
    all_gather_case(dtype, rows, drawn_group(draw))
}

fn all_gather_case(dtype: DType, rows: bool, mut group: Group) -> Case {
    let all = group.copied(dtype, group.shape);
    let width = group.shape[1];
    let gathered: Vec<u32> = if rows {
        all.iter().flat_map(|tensor| tensor.bits.iter().copied()).collect()
    } else {
        let row = |row: usize| {
            all.iter().flat_map(move |tensor| tensor.bits[row * width..][..width].iter().copied())
        };
        (0..group.shape[0]).flat_map(row).collect()
    };
    let expected = Expected::bits(gathered).laid(group.layout, 1);
    let call = |x: &Tensor| {
        let op = AllGather { axis: AXIS, ranks: group.ranks as u32, rows };
        CallCase::new(op, vec![Operand::laid(x.clone(), group.layout)], vec![expected.clone()])
    };
    Case { calls: all.iter().map(call).collect(), id: group.id, alike: true }
}

pub(super) fn reduce_scatter(dtype: DType) -> Vec<Case> {
    let of = |(rows, reduction): (bool, Reduction)| {
        let name = format!("reduce_scatter_{}{}", reduction.name(), if rows { "_rows" } else { "" });
        each(&name, dtype, |group| reduce_scatter_case(dtype, rows, reduction, group))
    };
    [false, true]
        .into_iter()
        .flat_map(|rows| reductions(dtype).map(move |r| (rows, r)))
        .flat_map(of)
        .collect()
}

pub(super) fn drawn_reduce_scatter(dtype: DType, draw: &mut Draw) -> Case {
    let reduction = draw.pick(&reductions(dtype).collect::<Vec<_>>());
    let rows = draw.sometimes();
    reduce_scatter_case(dtype, rows, reduction, drawn_group(draw))
}

fn reduce_scatter_case(dtype: DType, rows: bool, reduction: Reduction, mut group: Group) -> Case {
    let [mut height, mut width] = group.shape;
    let share = if rows { &mut height } else { &mut width };
    let kept = *share;
    *share *= group.ranks;
    let all = group.reduced(dtype, [height, width]);
    let (ranks, layout) = (group.ranks as u32, group.layout);
    let call = |(rank, x): (usize, &Tensor)| {
        let mine = |at: &usize| (if rows { at / width } else { at % width }) / kept == rank;
        let elements = (0..x.bits.len()).filter(mine).map(|at| combined(dtype, reduction, &all, at));
        let expected = Expected::new(elements.collect()).gated(inner(dtype)).laid(layout, 1);
        let op = ReduceScatter { axis: AXIS, ranks, rows, reduction };
        CallCase::new(op, vec![Operand::laid(x.clone(), layout)], vec![expected])
    };
    case(group.id, all.iter().enumerate().map(call).collect())
}

pub(super) fn all_to_all(dtype: DType) -> Vec<Case> {
    each("all_to_all", dtype, |group| all_to_all_case(dtype, group))
}

pub(super) fn drawn_all_to_all(dtype: DType, draw: &mut Draw) -> Case {
    all_to_all_case(dtype, drawn_group(draw))
}

fn all_to_all_case(dtype: DType, mut group: Group) -> Case {
    let [rows, width] = group.shape;
    let all = group.copied(dtype, [rows * group.ranks, width]);
    let block = rows * width;
    let (ranks, layout) = (group.ranks as u32, group.layout);
    let call = |(rank, x): (usize, &Tensor)| {
        let from = |other: &Tensor| other.bits[rank * block..][..block].to_vec();
        let expected = Expected::bits(all.iter().flat_map(from)).laid(layout, 1);
        let op = AllToAll { axis: AXIS, ranks };
        CallCase::new(op, vec![Operand::laid(x.clone(), layout)], vec![expected])
    };
    case(group.id, all.iter().enumerate().map(call).collect())
}

pub(super) fn broadcast(dtype: DType) -> Vec<Case> {
    each("broadcast", dtype, |group| broadcast_case(dtype, group))
}

pub(super) fn drawn_broadcast(dtype: DType, draw: &mut Draw) -> Case {
    broadcast_case(dtype, drawn_group(draw))
}

fn broadcast_case(dtype: DType, mut group: Group) -> Case {
    let all = group.copied(dtype, group.shape);
    let root = group.random.below(group.ranks);
    let expected = Expected::bits(all[root].bits.iter().copied());
    let call = |x: &Tensor| {
        let op = Broadcast { axis: AXIS, root: root as u32 };
        CallCase::new(op, vec![Operand::laid(x.clone(), group.layout)], vec![expected.clone()])
    };
    Case { calls: all.iter().map(call).collect(), id: group.id, alike: true }
}

pub(super) fn send_and_receive(dtype: DType) -> Vec<Case> {
    each_over(&[2, 4], "send", dtype, |group| send_case(dtype, group))
}

pub(super) fn drawn_send(dtype: DType, draw: &mut Draw) -> Case {
    let group = drawn_group(draw);
    send_case(dtype, Group { ranks: group.ranks.next_multiple_of(2), ..group })
}

/// Cases in which every even rank sends to the next rank.
fn send_case(dtype: DType, mut group: Group) -> Case {
    let all = group.copied(dtype, group.shape);
    let call = |rank: usize| {
        let operands = vec![Operand::laid(all[rank].clone(), group.layout)];
        if rank.is_multiple_of(2) {
            return CallCase::new(Send { axis: AXIS, peer: rank as u32 + 1 }, operands, Vec::new());
        }
        let expected = Expected::bits(all[rank - 1].bits.iter().copied());
        CallCase::new(Receive { axis: AXIS, peer: rank as u32 - 1 }, operands, vec![expected])
    };
    let calls = (0..group.ranks).map(call).collect();
    case(group.id, calls)
}

pub(super) fn barrier(dtype: DType) -> Vec<Case> {
    let call = || CallCase::new(Op::from(Barrier { axis: AXIS }), Vec::new(), Vec::new());
    (1..=4)
        .map(|ranks| case(format!("barrier/{dtype}/over_{ranks}"), (0..ranks).map(|_| call()).collect()))
        .collect()
}
