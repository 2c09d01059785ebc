//! A tensor of a bound call.

use dsrun_core::TensorDesc;

/// A tensor of a bound call.
#[derive(Clone, Debug)]
pub(crate) struct Bound {
    pub(crate) desc: TensorDesc,
    /// The address of its first element.
    pub(crate) address: u64,
    /// The address of its extent; 0 if all rows are valid.
    pub(crate) extent: u64,
}

impl Bound {
    /// Distance between neighbours of a dimension, in elements.
    pub(crate) fn stride(&self, dimension: usize) -> usize {
        self.desc.strides.get(dimension).copied().unwrap_or(1)
    }

    /// The size of a dimension; 1 for a dimension it does not have.
    pub(crate) fn size(&self, dimension: usize) -> usize {
        self.desc.shape.get(dimension).copied().unwrap_or(1)
    }
}
