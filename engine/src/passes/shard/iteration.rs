//! The dimensions of an op's iteration space that can be split over ranks, from its index maps.
//!
//! A dimension can be split if it is the outermost part of every tensor dimension that it indexes, so that a part of it is a
//! contiguous range of each tensor. Splitting a parallel dimension splits the results; splitting the reduced dimension of a
//! matrix product gives partial sums. Index maps do not describe lookups, so there are rules for two of them: the rows of an
//! embedding, and the KV heads of attention.

use crate::passes::rewrite::weight_operand;
use dsrun_core::{
    Result,
    op::{Axis, DimensionKind, GateLayout, IndexMaps, Op},
    program::{Call, Origin, Program, ValueId},
};

/// A dimension of an iteration space that can be split.
#[derive(Clone, Debug)]
pub(super) struct IterationSplit {
    /// For each operand, the tensor dimension that is split, if any.
    pub(super) operands: Vec<Option<SplitDimension>>,
    /// For each result, the tensor dimension that is split, if any.
    pub(super) results: Vec<Option<SplitDimension>>,
    /// Whether the results are partial sums.
    pub(super) sums: bool,
    /// Operands that the first rank alone has, because they are added to the sum.
    pub(super) first_rank_only: Vec<usize>,
}

/// A tensor dimension that is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SplitDimension {
    /// The dimension.
    pub(super) dimension: usize,
    /// How often the split dimension repeats inside the tensor dimension: once, or once per expert or slot.
    pub(super) repeats: usize,
    /// The number of indivisible blocks of each repetition.
    pub(super) blocks: usize,
    /// Whether several ranks may hold the same block: KV heads that are shared by several query heads.
    pub(super) shared: bool,
}

/// A dimension of a value that is split.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) value: ValueId,
    pub(super) dimension: usize,
    pub(super) repeats: usize,
    pub(super) blocks: usize,
    pub(super) shared: bool,
}

impl IterationSplit {
    /// The dimensions of the values of a call that are split.
    pub(super) fn places<'a>(&'a self, call: &'a Call) -> impl Iterator<Item = Place> + 'a {
        let operands = self.operands.iter().zip(call.operands.iter().copied());
        let results = self.results.iter().zip(call.results.iter().copied().map(Some));
        operands.chain(results).filter_map(|(split, value)| {
            let SplitDimension { dimension, repeats, blocks, shared } = (*split)?;
            Some(Place { value: value?, dimension, repeats, blocks, shared })
        })
    }
}

/// Whether the tensors of an op have one block per expert, or per slot of a token, side by side. A split then takes a range
/// within every block.
fn is_of_experts(op: &Op) -> bool {
    matches!(op, Op::GroupedLinear(_) | Op::MoeCombine(_))
}

/// The number of slots of a token, if a value holds the results of experts for each of them.
pub(super) fn slots_of(program: &Program, value: ValueId) -> Option<usize> {
    let Origin::Node(node) = program.values.get(value.index())?.origin else { return None };
    let call = &program.nodes.get(node)?.call;
    match call.op {
        Op::GroupedLinear(_) => {
            let experts = (*call.operands.get(2)?)?;
            program.value(experts).ok()?.tensor_type()?.shape.get(1)?.known()
        }
        _ => elementwise_slots(program, call),
    }
}

/// Same as [`slots_of`], for the operands of an elementwise op.
pub(super) fn elementwise_slots(program: &Program, call: &Call) -> Option<usize> {
    let is_elementwise = match &call.op {
        Op::GatedActivation(op) => op.layout == GateLayout::Separate,
        Op::Activation(_) | Op::Cast(_) => true,
        _ => false,
    };
    let x = call.operands.first().copied().flatten().filter(|_| is_elementwise)?;
    slots_of(program, x)
}

/// The dimensions of a call's iteration space that can be split.
///
/// # Errors
/// If the call is not valid.
pub(super) fn iteration_splits(program: &Program, call: &Call) -> Result<Vec<IterationSplit>> {
    let types = program.operand_types(&call.operands)?;
    let maps = call.op.index_maps(&types)?;
    let bias = match call.op {
        Op::GroupedLinear(_) => Some(3),
        _ => weight_operand(&call.op).map(|weight| weight + 1),
    };
    let mut splits = Vec::new();
    // Experts are split in `experts`, not here: the slots of a rank's experts are not a contiguous range of a tensor.
    let of_experts = ["experts", "slots"];
    for (index, dimension) in maps.dimensions.iter().enumerate() {
        if is_of_experts(&call.op) && of_experts.contains(&dimension.name) {
            continue;
        }
        let sums = match dimension.kind {
            DimensionKind::Parallel => false,
            // Only matrix products may be split along a reduced dimension: they are linear in it.
            DimensionKind::Reduced if bias.is_some() => true,
            DimensionKind::Reduced | DimensionKind::Whole => continue,
        };
        let along = |axes: &Vec<Axis>| along(&call.op, &maps, axes, index);
        let (Some(operands), Some(results)) = (
            maps.operands.iter().map(along).collect::<Option<Vec<_>>>(),
            maps.results.iter().map(along).collect::<Option<Vec<_>>>(),
        ) else {
            continue;
        };
        let splits_results = results.iter().all(Option::is_some);
        if operands.iter().any(Option::is_some) && splits_results != sums {
            let first_rank_only = bias.filter(|_| sums).into_iter().collect();
            splits.push(IterationSplit { operands, results, sums, first_rank_only });
        }
    }
    if let Some(slots) = elementwise_slots(program, call).filter(|slots| *slots > 1) {
        let columns = |split: &mut IterationSplit| {
            for side in split.operands.iter_mut().chain(&mut split.results).flatten() {
                (side.repeats, side.blocks) = (slots, side.blocks / slots);
            }
        };
        splits.iter_mut().for_each(columns);
    }
    splits.extend(vocabulary(program, call));
    Ok(splits)
}

/// The tensor dimension that a dimension of the iteration space splits: `Some(None)` if it does not index the tensor, `None` if
/// its parts are not contiguous ranges of the tensor.
fn along(op: &Op, maps: &IndexMaps, axes: &[Axis], index: usize) -> Option<Option<SplitDimension>> {
    let size = |dimension: usize| maps.dimensions.get(dimension)?.size.known();
    let mut found = None;
    for (dimension, axis) in axes.iter().enumerate() {
        let list = match axis {
            Axis::Gathered => continue,
            Axis::From { dimension, .. } if *dimension == index => return None,
            Axis::From { .. } => continue,
            Axis::Of(list) if !list.contains(&index) => continue,
            Axis::Of(list) => list,
        };
        let before = list.iter().copied().take_while(|dimension| *dimension != index);
        let repeats = before.map(size).product::<Option<usize>>()?;
        if (repeats != 1 && !is_of_experts(op)) || found.is_some() {
            return None;
        }
        let mut split = SplitDimension { dimension, repeats, blocks: size(index)?, shared: false };
        if let (Op::PagedAttention(_) | Op::Attention(_), Some(group)) = (op, group_of_heads(maps, index)) {
            if list.contains(&group) {
                split.blocks *= size(group)?;
            } else {
                split.shared = true;
            }
        }
        found = Some(split);
    }
    Some(found)
}

/// The dimension of the query heads that read one KV head, if `index` is the dimension of KV heads of an attention op.
fn group_of_heads(maps: &IndexMaps, index: usize) -> Option<usize> {
    let place = |name: &str| maps.dimensions.iter().position(|dimension| dimension.name == name);
    place("group").filter(|_| place("kv_heads") == Some(index))
}

/// The rows of an embedding. Ids outside a rank's rows give zeros, so the results of all ranks add up; positions are added once.
fn vocabulary(program: &Program, call: &Call) -> Option<IterationSplit> {
    let Op::Embed(_) = call.op else { return None };
    let table = program.value((*call.operands.get(1)?)?).ok()?.weight_type()?;
    let rows = SplitDimension { dimension: 0, repeats: 1, blocks: table.rows(), shared: false };
    let mut operands = vec![None; call.operands.len()];
    operands[1] = Some(rows);
    Some(IterationSplit {
        operands,
        results: vec![None; call.results.len()],
        sums: true,
        first_rank_only: vec![2, 3],
    })
}
