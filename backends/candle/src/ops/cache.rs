//! Writing keys and values into the paged KV cache.

use super::quant::quantised;
use crate::{
    kernels::Kernel,
    tensor::{Result, floats, operand, rounded_bytes, rows},
};
use candle_core::Tensor;
use dsrun_core::{
    DType,
    cache_row::{CACHE_GROUP, CACHE_SCALE_BYTES, cache_row_size},
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

/// Rows `[N, D]` as an i8 cache stores them: the integers of a row, and behind them the scale of each group.
fn quantised_bytes(rows: &Tensor) -> Result<Vec<u8>> {
    let (count, size) = rows.dims2()?;
    let row_size = cache_row_size(DType::I8, size);
    let mut bytes = vec![0; count * row_size];
    for (number, first) in (0..if count > 0 { size } else { 0 }).step_by(CACHE_GROUP).enumerate() {
        let group = rows.narrow(1, first, CACHE_GROUP.min(size - first))?.contiguous()?;
        let (integers, scales) = quantised(&group)?;
        let integers = rounded_bytes(&integers, DType::I8)?;
        let (values, scales) = (group.to_vec2::<f32>()?, scales.flatten_all()?.to_vec1::<f32>()?);
        let groups = integers.chunks_exact(group.dim(1)?).zip(values).zip(scales);
        for (row, ((integers, values), scale)) in bytes.chunks_exact_mut(row_size).zip(groups) {
            // An infinite or NaN value makes all of its group NaN.
            let scale = if values.iter().all(|value| value.is_finite()) { scale } else { f32::NAN };
            row[first..][..integers.len()].copy_from_slice(integers);
            row[size + number * CACHE_SCALE_BYTES..][..CACHE_SCALE_BYTES]
                .copy_from_slice(&scale.to_le_bytes());
        }
    }
    Ok(bytes)
}
