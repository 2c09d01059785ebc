//! How the elements of operands and results hang together: the iteration space of an op.
//!
//! An op runs over a space of named dimensions. Every dimension of an operand or result is a product of some of them, a
//! part that one of them runs over, or is reached through data. From this alone `fuse` decides which ops can share a tile and `shard` where a layout changes.

use crate::tensor::Size;

/// What happens along a dimension of the iteration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DimensionKind {
    /// Every element is computed by itself: the dimension can be tiled and sharded freely.
    Parallel,
    /// Summed, maximised or otherwise contracted: it is not in the results.
    Reduced,
    /// In the results, but every result element needs all of it (a norm over the features, rotated pairs, a softmax):
    /// it must stay within one tile.
    Whole,
}

/// A dimension of the iteration space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IterationDimension {
    /// A name for people.
    pub name: &'static str,
    /// What happens along it.
    pub kind: DimensionKind,
    /// How long it is.
    pub size: Size,
}

/// How one dimension of an operand or result is addressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// The product of these dimensions of the iteration space, outermost first.
    Of(&'static [usize]),
    /// One dimension of the iteration space, over a part of the tensor's: its element 0 is element `start` of the tensor.
    From {
        /// The dimension of the iteration space.
        dimension: usize,
        /// Where in the tensor it begins.
        start: usize,
    },
    /// The index comes from data (ids, slots, block tables): any element may be needed.
    Gathered,
}

/// The iteration space of a call and how operands and results are laid over it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexMaps {
    /// The iteration space.
    pub dimensions: Vec<IterationDimension>,
    /// For each operand, one axis per dimension; empty if the operand is absent.
    pub operands: Vec<Vec<Axis>>,
    /// For each result, one axis per dimension.
    pub results: Vec<Vec<Axis>>,
}

/// The map of an operand that is left out.
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

    /// The maps of an op that has no tiles: everything is reached through data.
    pub(crate) fn opaque(operand_ranks: impl IntoIterator<Item = usize>, result_ranks: &[usize]) -> Self {
        Self {
            dimensions: Vec::new(),
            operands: operand_ranks.into_iter().map(|rank| vec![Axis::Gathered; rank]).collect(),
            results: result_ranks.iter().map(|rank| vec![Axis::Gathered; *rank]).collect(),
        }
    }
}
