//! The TMA tensor maps of `batch_wgmma` and `tile_wgmma`: activations and weights in boxes with rows of 128 bytes.

use crate::{
    driver::tensor_map::TensorMap,
    ops::{
        bound::Bound,
        weight::{CudaWeight, UNIT},
    },
};
use dsrun_core::Result;

/// Bytes of a row in a k tile.
pub(super) const ROW_BYTES: usize = 128;
/// Shared memory for the ring buffer if an SM has one block.
pub(super) const RING: usize = 224 << 10;
/// Alignment of the ring buffer.
pub(super) const ALIGNMENT: usize = 1024;
/// Outputs in a reordered group: each lane of a quad has 8 neighbours of them.
pub(super) const ORDER: usize = 32;
/// Outputs of a warpgroup.
pub(super) const OUTPUTS: usize = 64;
/// Packed bytes are stored in lines of 16 inputs of a unit's rows.
const LINE_INPUTS: usize = 16;
const LINE: usize = LINE_INPUTS * UNIT;

fn rows(address: u64, [rows, bytes, stride]: [usize; 3], at_once: usize) -> Result<TensorMap> {
    let sizes = [bytes as u64, rows as u64];
    TensorMap::bytes(address, sizes, [stride as u64], [ROW_BYTES as u32, at_once as u32], true)
}

/// Rows of activations, `at_once` of them per copy.
pub(super) fn activations(x: &Bound, inputs: usize, at_once: usize) -> Result<TensorMap> {
    let element = x.desc.dtype.bytes();
    rows(x.address, [x.size(0), inputs * element, x.stride(0) * element], at_once)
}

/// Rows of dense 16-bit weights, `at_once` of them per copy.
pub(super) fn weights(weight: &CudaWeight, at_once: usize) -> Result<TensorMap> {
    let layout = &weight.layout;
    rows(weight.address(), [layout.rows, layout.columns * 2, layout.row_bytes], at_once)
}

/// Rows of dense weights, `at_once` of them per copy, reordered so that a lane's results are 8 neighbours: in the accumulators a
/// lane of a quad has two neighbouring columns of every 8, and four of these pairs become 8 neighbouring rows of every 32.
pub(super) fn ordered_weights(weight: &CudaWeight, at_once: usize) -> Result<TensorMap> {
    let bytes = weight.layout.columns as u64 * 2;
    let row = weight.layout.row_bytes as u64;
    let eights = weight.layout.rows / ORDER;
    // Dimensions: inputs, two neighbours, lanes, column pairs of a lane, groups of 32.
    let sizes = [bytes, 2, 4, 4, eights as u64];
    let strides = [1, 8, 2, ORDER as u64].map(|rows| rows * row);
    TensorMap::bytes(
        weight.address(),
        sizes,
        strides,
        [ROW_BYTES as u32, 2, 4, 4, (at_once / ORDER) as u32],
        true,
    )
}

/// Rows of weights, [`OUTPUTS`] of them per copy, in the order of rotary pairs: 8 of the first half of a head, then the 8 that
/// they are rotated with, half a head further.
pub(super) fn paired_weights(weight: &CudaWeight, head: usize) -> Result<TensorMap> {
    let row = weight.layout.row_bytes as u64;
    let (half, heads) = ((head / 2) as u64, (weight.layout.rows / head) as u64);
    let (eights, of_part) = (half / UNIT as u64, (OUTPUTS / 2 / UNIT) as u32);
    if weight.layout.packing.is_some() {
        let [line, lines] = [LINE as u64, row / LINE as u64];
        let strides = [line, eights * row, row, 2 * eights * row];
        let at_once = [LINE as u32, (ROW_BYTES / LINE_INPUTS) as u32, 2, of_part, 1];
        TensorMap::bytes(weight.address(), [line, lines, 2, eights, heads], strides, at_once, false)
    } else {
        let strides = [1, half, UNIT as u64, head as u64].map(|rows| rows * row);
        let bytes = weight.layout.columns as u64 * 2;
        let at_once = [ROW_BYTES as u32, UNIT as u32, 2, of_part, 1];
        TensorMap::bytes(weight.address(), [bytes, UNIT as u64, 2, eights, heads], strides, at_once, true)
    }
}

/// Rows of packed bytes, `at_once` of them per copy.
pub(super) fn packed_weights(weight: &CudaWeight, at_once: usize) -> Result<TensorMap> {
    let unit = weight.layout.row_bytes;
    let sizes = [LINE, unit / LINE, weight.layout.rows.div_ceil(UNIT)].map(|size| size as u64);
    let strides = [LINE, unit].map(|stride| stride as u64);
    let at_once = [LINE, ROW_BYTES / LINE_INPUTS, at_once / UNIT].map(|size| size as u32);
    TensorMap::bytes(weight.address(), sizes, strides, at_once, false)
}
