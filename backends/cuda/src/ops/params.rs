//! Parameter structs of several kernel families: `kernels/params.cuh`.

use crate::{
    driver::kernel_struct::{Pointer, declaration, header, kernel_struct},
    ops::{bound::Bound, weight::CudaWeight},
};

/// The maximum number of different row counts of an extent: no op has more operands and results over one dimension.
pub(in crate::ops) const EXTENTS: usize = 8;

kernel_struct! {
    /// The number of valid rows of a dimension. The kernels' `struct Extent` derives from it.
    pub(in crate::ops) struct ExtentParams {
        /// Addresses of row counts in device memory, without gaps; null after the last.
        pub(in crate::ops) counts: [Pointer; EXTENTS] = "const int*",
        /// The maximum number of rows.
        pub(in crate::ops) rows: i64 = "i64",
    }
}

kernel_struct! {
    /// A row-major matrix. The kernels' `struct Matrix` derives from it.
    pub(in crate::ops) struct MatrixParams {
        /// The first element; null if the matrix is absent.
        pub(in crate::ops) first: Pointer = "void*",
        /// Distance between rows, in elements.
        pub(in crate::ops) stride: i64 = "i64",
    }
}

kernel_struct! {
    /// A packed weight. The kernels' `struct WeightOf` derives from it.
    pub(in crate::ops) struct WeightParams {
        /// Dense rows, or packed integers.
        pub(in crate::ops) elements: Pointer = "const u8*",
        /// Scales and offsets of the groups of packed integers.
        pub(in crate::ops) scales: Pointer = "const u8*",
        /// Bytes between rows of elements, or between units of 8 rows if they are packed.
        pub(in crate::ops) row_bytes: i64 = "i64",
        /// Bytes between units of 8 rows of scales.
        pub(in crate::ops) scale_bytes: i64 = "i64",
    }
}

kernel_struct! {
    /// Distances between pages, heads and slots of a cache, in elements.
    pub(in crate::ops) struct Strides {
        pub(in crate::ops) page: i64 = "i64",
        pub(in crate::ops) head: i64 = "i64",
        pub(in crate::ops) slot: i64 = "i64",
    }
}

/// The distinct addresses that are not null.
pub(in crate::ops) fn distinct(mut addresses: Vec<u64>) -> Vec<u64> {
    addresses.retain(|address| *address != 0);
    addresses.sort_unstable();
    addresses.dedup();
    addresses
}

impl ExtentParams {
    /// The extent of these tensors, each of which has at most `rows` rows.
    pub(in crate::ops) fn of(rows: usize, tensors: &[&Bound]) -> Self {
        Self::new(rows, distinct(tensors.iter().map(|tensor| tensor.extent).collect()))
    }

    /// The extent of at most [`EXTENTS`] row counts, none of which is null.
    pub(in crate::ops) fn new(rows: usize, mut counts: Vec<u64>) -> Self {
        counts.resize(EXTENTS, 0);
        Self { counts: std::array::from_fn(|index| counts[index]), rows: rows as i64 }
    }
}

impl MatrixParams {
    /// The rows of a tensor of two dimensions.
    pub(in crate::ops) fn of(tensor: &Bound) -> Self {
        Self { first: tensor.address, stride: tensor.stride(0) as i64 }
    }

    /// Same as [`Self::of`], for an operand that may be absent.
    pub(in crate::ops) fn optional(tensor: Option<&Bound>) -> Self {
        tensor.map_or_else(Self::default, Self::of)
    }
}

impl WeightParams {
    /// The parameters of a weight.
    pub(in crate::ops) fn of(weight: &CudaWeight) -> Self {
        Self {
            elements: weight.address(),
            scales: weight.scales(),
            row_bytes: weight.layout.row_bytes as i64,
            scale_bytes: weight.layout.scale_bytes as i64,
        }
    }
}

impl Strides {
    /// The strides of a cache `[pages, heads, slots, size]`.
    pub(in crate::ops) fn of(cache: &Bound) -> Self {
        let [page, head, slot] = [0, 1, 2].map(|dimension| cache.stride(dimension) as i64);
        Self { page, head, slot }
    }
}

/// The text of `kernels/params.cuh`.
pub(crate) fn params_header() -> String {
    header(
        "Parameter structs of several kernel families.",
        &[
            declaration::<ExtentParams>(),
            declaration::<MatrixParams>(),
            declaration::<WeightParams>(),
            declaration::<Strides>(),
        ],
    )
}
