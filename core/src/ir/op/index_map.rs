//! The iteration space of an op, and the maps of its operands and results onto it.
//!
//! An op iterates over named dimensions. Each dimension of an operand or result is a product of some of them, a slice that one
//! of them runs over, or indexed by data. From these maps the `fuse` pass decides which ops can share a tile.

use crate::tensor::Size;

/// The role of a dimension of the iteration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DimensionKind {
    /// Elements are computed independently, so the dimension can be tiled and sharded freely.
    Parallel,
    /// The dimension is reduced: it does not appear in the results.
    Reduced,
    /// The dimension appears in the results, but every result element needs all of it (a norm over the features, rotated
    /// pairs, a softmax), so it must stay within one tile.
    Whole,
}

/// A dimension of the iteration space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IterationDimension {
    /// The name, for people to read.
    pub name: &'static str,
    /// The role.
    pub kind: DimensionKind,
    /// The size.
    pub size: Size,
}

/// The map of one dimension of an operand or result onto the iteration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// The product of these dimensions of the iteration space, outermost first.
    Of(&'static [usize]),
    /// One dimension of the iteration space, over a slice of the tensor dimension that begins at `start`.
    From {
        /// The dimension of the iteration space.
        dimension: usize,
        /// The first element of the slice.
        start: usize,
    },
    /// Indexed by data (ids, slots, block tables): any element may be needed.
    Gathered,
}

/// The iteration space of a call, and the maps of its operands and results onto it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexMaps {
    /// The iteration space.
    pub dimensions: Vec<IterationDimension>,
    /// For each operand, one axis per dimension; empty if the operand is absent.
    pub operands: Vec<Vec<Axis>>,
    /// For each result, one axis per dimension.
    pub results: Vec<Vec<Axis>>,
}

/// The map of an absent operand.
pub(crate) const ABSENT: &[Axis] = &[];

impl IndexMaps {
    pub(crate) fn new(
        dimensions: impl IntoIterator<Item = (&'static str, DimensionKind, Size)>,
        operands: &[&[Axis]],
        results: &[&[Axis]],
    ) -> Self {
        let dimensions =
            dimensions.into_iter().map(|(name, kind, size)| IterationDimension { name, kind, size });
        Self {
            dimensions: dimensions.collect(),
            operands: operands.iter().map(|axes| axes.to_vec()).collect(),
            results: results.iter().map(|axes| axes.to_vec()).collect(),
        }
    }

    /// The maps of an op without tiles: every dimension is indexed by data.
    pub(crate) fn opaque(operand_ranks: impl IntoIterator<Item = usize>, result_ranks: &[usize]) -> Self {
        Self {
            dimensions: Vec::new(),
            operands: operand_ranks.into_iter().map(|rank| vec![Axis::Gathered; rank]).collect(),
            results: result_ranks.iter().map(|rank| vec![Axis::Gathered; *rank]).collect(),
        }
    }
}
