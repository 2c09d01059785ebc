//! The packed weights of a layer, side by side.

use dsrun_core::kernels::WeightDesc;

/// A layer whose weights can be streamed.
#[derive(Clone, Debug)]
pub(crate) struct StreamedLayer {
    /// Its packed weights, side by side.
    pub(crate) weights: Vec<PlacedWeight>,
    /// Bytes of all of them, with padding for alignment.
    pub(crate) bytes: usize,
}

/// A packed weight's place in its layer.
#[derive(Clone, Debug)]
pub(crate) struct PlacedWeight {
    /// The name of the value.
    pub(crate) name: String,
    /// The description by which the slot memory is adopted as a weight; it is not constant, because the slot is overwritten.
    pub(crate) desc: WeightDesc,
    /// Where it begins.
    pub(crate) offset: usize,
    /// Its packed bytes.
    pub(crate) bytes: usize,
}
