//! Writing keys and values into the paged KV cache.

use super::quant::quantised;
use crate::{
    kernels::Kernel,
    tensor::{Result, floats, operand, rounded_bytes, rows},
};
use candle_core::Tensor;
use dsrun_core::{
    DType,
    cache_row::{CACHE_SCALE_BYTES, cache_row_size},
    op::{KvWrite, LatentWrite},
};
use dsrun_host::Frame;

impl Kernel for KvWrite {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        for (index, source) in [2, 3].into_iter().enumerate() {
            write(frame, index, &[source], 4)?;
        }
        Ok(())
    }
}

impl Kernel for LatentWrite {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        // The values, and behind them the rest of the keys.
        write(frame, 0, &[1, 2], 3)
    }
}

/// Writes the rows of these operands, head by head one behind the other, into their slots of the cache that is result `index`.
fn write(frame: &Frame<'_>, index: usize, sources: &[usize], slots: usize) -> Result<()> {
    let rows = rows(frame, &[sources, &[slots]].concat(), &[]);
    let (slots, dtype) = (frame.input::<i32>(slots)?, frame.result_dtype(index)?);
    let mut cache = frame.bytes_mut(index)?;
    let (heads, block) = (cache.shape[1], cache.shape[2]);
    let (page, head, slot) = (cache.strides[0], cache.strides[1], cache.strides[2]);
    let mut offset = 0;
    for source in sources {
        let (bytes, size) = if dtype == DType::I8 {
            let values = floats(frame, *source, rows)?;
            let size = values.dim(1)? / heads;
            (quantised_bytes(&values.reshape((rows * heads, size))?)?, cache_row_size(dtype, size))
        } else {
            let values = operand(frame, *source, rows)?;
            (rounded_bytes(&values, dtype)?, values.dim(1)? / heads)
        };
        let head_bytes = size * cache.data.element();
        // Slot s is slot s % B of page s / B.
        for row in 0..rows {
            let Some(index) = slots.index(row, cache.rows.saturating_mul(block)) else { continue };
            for number in 0..heads {
                let start = index / block * page + number * head + index % block * slot + offset;
                let bytes = &bytes[(row * heads + number) * head_bytes..][..head_bytes];
                cache.data.range_mut(start, size).copy_from_slice(bytes);
            }
        }
        offset += size;
    }
    Ok(())
}

/// Rows `[N, D]` as an i8 cache stores them: the integers of a row, and behind them its scale.
fn quantised_bytes(rows: &Tensor) -> Result<Vec<u8>> {
    let (count, size) = rows.dims2()?;
    if count == 0 || size == 0 {
        return Ok(vec![0; count * CACHE_SCALE_BYTES]);
    }
    let (integers, scales) = quantised(rows)?;
    let integers = rounded_bytes(&integers, DType::I8)?;
    let (rows, scales) = (rows.to_vec2::<f32>()?, scales.flatten_all()?.to_vec1::<f32>()?);
    let mut bytes = Vec::new();
    for ((integers, row), scale) in integers.chunks_exact(size).zip(rows).zip(scales) {
        // An infinite or NaN value makes all of its row NaN.
        let scale = if row.iter().all(|value| value.is_finite()) { scale } else { f32::NAN };
        bytes.extend_from_slice(integers);
        bytes.extend_from_slice(&scale.to_le_bytes());
    }
    Ok(bytes)
}
