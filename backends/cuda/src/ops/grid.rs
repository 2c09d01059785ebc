//! Blocks and threads of kernels over rows and columns.

use crate::driver::launch::MAX_GRID;
use dsrun_core::TensorDesc;

/// Threads of a block of kernels over planes.
pub(crate) const THREADS: usize = 256;

/// Elements that a thread of a wide kernel takes at a time.
pub(super) const WIDE: usize = 8;
/// Rows from which on wide kernels pay: fewer have too few threads to fill the device.
const WIDE_ROWS: usize = 16;

/// Blocks that loop over rows when `at_once` are resident: as few as need equally many rounds.
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
