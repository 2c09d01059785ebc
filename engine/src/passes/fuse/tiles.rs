//! The tile rule: decides from the index maps of calls which of them can be fused tile by tile.
//!
//! A tile is a part of an op's result that is computed independently of the rest. A call may follow another in a run if each of
//! its tiles depends on one tile of the other's result:
//!
//! - No dimension between them is indexed by data, because then any tile might be needed.
//! - A dimension that the second call reduces, or needs as a whole, lies within one tile of the first. Almost any op can be
//!   tiled that way. A matrix product cannot along its outputs, because its output tiles are distributed over the device. So a
//!   call that needs all outputs of a product at once (a norm, the next product) stays outside; one that needs a group of them
//!   (a head) may follow.
//! - Every output tile of a product needs the same activations, so each tile recomputes the calls that produce them. These
//!   must be cheap: no product, no update in place, and no result that is read outside the run, because every tile would
//!   write it.
//!
//! Finally, no call of a run reads what another call of the run updates in place, because tiles run in no fixed order.

use super::Run;
use dsrun_core::{
    Result, Size,
    op::{Axis, DimensionKind, IndexMaps, Op},
    program::{Lane, Node, Program, ValueId},
};
use std::collections::{HashMap, HashSet};

/// How a call can be tiled.
#[derive(Clone, Debug)]
pub(super) struct Tiles {
    maps: IndexMaps,
    product: bool,
}

impl Tiles {
    /// The tiles of a call; `None` if it must not be fused: a region is fused already, and a collective waits for other ranks.
    pub(super) fn of(program: &Program, node: &Node) -> Result<Option<Self>> {
        if matches!(node.call.op, Op::Region(_))
            || node.call.op.mesh_axis().is_some()
            || node.lane != Lane::Compute
        {
            return Ok(None);
        }
        let value = |id: &Option<ValueId>| id.map(|id| Ok(program.value(id)?.value_type.clone())).transpose();
        let types = node.call.operands.iter().map(value).collect::<Result<Vec<_>>>()?;
        let maps = node.call.op.index_maps(&types)?;
        let product = is_product(&maps);
        Ok(Some(Self { maps, product }))
    }

    /// Whether tiles split a dimension.
    fn is_cut(&self, dimension: usize) -> bool {
        self.maps.dimensions.get(dimension).is_some_and(|dimension| {
            dimension.kind == DimensionKind::Parallel && dimension.size != Size::Static(1)
        })
    }

    /// Whether a tile needs a tensor's whole dimension, given how the dimension is indexed.
    fn needs_all(&self, axis: &Axis) -> bool {
        match axis {
            Axis::Of(dimensions) => !dimensions.iter().any(|dimension| self.is_cut(*dimension)),
            Axis::From { dimension, .. } => !self.is_cut(*dimension),
            Axis::Gathered => true,
        }
    }
}

/// Whether a call is a matrix product: it reduces a dimension that two operands share, and each operand has a dimension that
/// the other lacks, so both are read many times.
fn is_product(maps: &IndexMaps) -> bool {
    let has = |axes: &[Axis], wanted: usize| {
        axes.iter().any(|axis| matches!(axis, Axis::Of(dimensions) if dimensions.contains(&wanted)))
    };
    let lacks = |a: &[Axis], b: &[Axis]| {
        a.iter().any(|axis| match axis {
            Axis::Of(dimensions) => dimensions.iter().any(|dimension| !has(b, *dimension)),
            Axis::From { .. } => false,
            Axis::Gathered => true,
        })
    };
    let reduced =
        (0..maps.dimensions.len()).filter(|index| maps.dimensions[*index].kind == DimensionKind::Reduced);
    reduced.into_iter().any(|reduced| {
        let sharing: Vec<&Vec<Axis>> = maps.operands.iter().filter(|axes| has(axes, reduced)).collect();
        sharing.iter().any(|a| sharing.iter().any(|b| lacks(a, b) && lacks(b, a)))
    })
}

/// A value that a run computes.
#[derive(Clone, Copy, Debug)]
struct Made {
    node: usize,
    result: usize,
    /// Whether a row of it depends on all outputs of a product of the run.
    whole: bool,
}

/// Consecutive calls that may share a tile.
#[derive(Debug)]
pub(super) struct TileRun<'a> {
    program: &'a Program,
    tiles: &'a [Option<Tiles>],
    nodes: Vec<usize>,
    made: HashMap<ValueId, Made>,
    read: HashSet<ValueId>,
    /// Calls that every tile of a product recomputes.
    recomputed: HashSet<usize>,
}

impl<'a> TileRun<'a> {
    /// An empty run.
    pub(super) fn new(program: &'a Program, tiles: &'a [Option<Tiles>]) -> Self {
        Self {
            program,
            tiles,
            nodes: Vec::new(),
            made: HashMap::new(),
            read: HashSet::new(),
            recomputed: HashSet::new(),
        }
    }

    /// Checks that each tile of a call needs only one tile of an operand that the run computes. Returns `None` if it needs more,
    /// else whether the operand depends on all outputs of a product.
    fn follows(&self, id: ValueId, made: Made, tiles: &Tiles, axes: &[Axis]) -> Option<bool> {
        let shape = &self.program.values[id.index()].tensor_type()?.shape;
        let producer = self.tiles[made.node].as_ref()?.maps.results.get(made.result)?;
        let mut whole = made.whole;
        for (dimension, (axis, made_by)) in axes.iter().zip(producer).enumerate() {
            if *axis == Axis::Gathered || *made_by == Axis::Gathered {
                return None;
            }
            let last = dimension + 1 == axes.len();
            if tiles.needs_all(axis) && shape[dimension] != Size::Static(1) && (!last || made.whole) {
                return None;
            }
            if let Axis::From { dimension: part, .. } = axis
                && last
                && tiles.maps.dimensions[*part].size != shape[dimension]
            {
                whole = false;
            }
        }
        Some(whole)
    }

    /// Marks a call of the run, and the calls it depends on, as recomputed in every tile. Returns whether the rule allows it.
    fn recompute(&mut self, node: usize) -> bool {
        let call = &self.program.nodes[node].call;
        let product = self.tiles[node].as_ref().is_none_or(|tiles| tiles.product);
        let updates = (0..call.results.len()).any(|result| call.op.updates(result).is_some());
        if product || updates {
            return false;
        }
        if !self.recomputed.insert(node) {
            return true;
        }
        let makers: Vec<usize> =
            call.operands.iter().flatten().filter_map(|id| Some(self.made.get(id)?.node)).collect();
        makers.into_iter().all(|maker| self.recompute(maker))
    }
}

impl Run for TileRun<'_> {
    fn join(&mut self, index: usize) -> bool {
        let (node, Some(tiles)) = (&self.program.nodes[index], &self.tiles[index]) else { return false };
        let first = self.nodes.first().map(|first| &self.program.nodes[*first]);
        if first.is_some_and(|first| first.segment != node.segment) {
            return false;
        }
        let mut whole = false;
        let mut connected = first.is_none();
        for (operand, id) in node.call.operands.iter().enumerate() {
            let Some((id, made)) = id.and_then(|id| Some((id, *self.made.get(&id)?))) else { continue };
            connected = true;
            let Some(part_of_whole) = self.follows(id, made, tiles, &tiles.maps.operands[operand]) else {
                return false;
            };
            whole |= part_of_whole;
            if tiles.product && !self.recompute(made.node) {
                return false;
            }
        }
        let updates = (0..node.call.results.len()).filter_map(|result| node.call.op.updates(result));
        let mut updated = updates.filter_map(|operand| node.call.operands[operand]);
        if !connected || updated.any(|id| self.read.contains(&id)) {
            return false;
        }
        self.nodes.push(index);
        self.read.extend(node.call.operands.iter().flatten());
        for (result, id) in node.call.results.iter().enumerate() {
            self.made.insert(*id, Made { node: index, result, whole: whole || tiles.product });
        }
        true
    }

    /// Whether every recomputed result is read only inside the run.
    fn may_end(&self, uses: &[usize]) -> bool {
        let inside = |id: &ValueId| {
            let operands = self.nodes.iter().flat_map(|node| &self.program.nodes[*node].call.operands);
            operands.filter(|operand| **operand == Some(*id)).count()
        };
        let results = self.recomputed.iter().flat_map(|node| &self.program.nodes[*node].call.results);
        results.into_iter().all(|id| uses[id.index()] == inside(id))
    }

    fn recomputed(&self) -> usize {
        self.recomputed.len()
    }
}
