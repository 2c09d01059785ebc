//! Blocks and threads of kernels over rows and columns.

use crate::driver::launch::MAX_GRID;
use dsrun_core::TensorDesc;

/// Threads of a block of kernels over planes.
pub(crate) const THREADS: usize = 256;

/// Elements that a thread of a wide kernel processes at a time.
pub(super) const WIDE: usize = 8;
/// The minimum number of rows for wide kernels: with fewer, there are too few threads to fill the device.
const WIDE_ROWS: usize = 16;

/// The number of blocks that loop over rows, if `at_once` are resident: the fewest that need the same number of iterations.
pub(super) fn evenly(rows: usize, at_once: usize) -> usize {
    let rounds = rows.div_ceil(at_once.max(1)).max(1);
    rows.div_ceil(rounds)
}

/// Whether tensors of two dimensions have many rows that allow vectors of [`WIDE`] elements.
pub(super) fn wide(planes: &[&TensorDesc]) -> bool {
    planes.iter().all(|plane| {
        let [rows, columns] = plane.shape[..] else { return false };
        let aligned = columns.is_multiple_of(WIDE) && plane.strides[0].is_multiple_of(WIDE);
        aligned && rows >= WIDE_ROWS
    })
}

/// The grid of kernels over planes: chunks of columns, rows.
pub(super) fn plane(rows: usize, columns: usize) -> [usize; 3] {
    [columns.div_ceil(THREADS).min(1 << 20), rows.min(MAX_GRID), 1]
}
