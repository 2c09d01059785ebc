//! Structs that kernels of several families take.

use crate::{
    driver::kernel_struct::{declaration, header, kernel_struct},
    ops::frame::Bound,
};

kernel_struct! {
    /// Distances between pages, heads and slots of a cache, in elements.
    pub(in crate::ops) struct Strides {
        pub(in crate::ops) page: i64 = "i64",
        pub(in crate::ops) head: i64 = "i64",
        pub(in crate::ops) slot: i64 = "i64",
    }
}

impl Strides {
    /// The strides of a cache `[pages, heads, slots, size]`.
    pub(in crate::ops) fn of(cache: &Bound) -> Self {
        let [page, head, slot] = [0, 1, 2].map(|dimension| cache.stride(dimension) as i64);
        Self { page, head, slot }
    }
}

/// The text of `kernels/strides.cuh`.
pub(crate) fn strides_header() -> String {
    header("Strides of a paged cache.", &[declaration::<Strides>()])
}
