//! Writing keys and values into the paged KV cache.

use crate::{
    kernels::Kernel,
    tensor::{Result, operand, rounded_bytes, rows},
};
use dsrun_core::op::{KvWrite, LatentWrite};
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
        let values = operand(frame, *source, rows)?;
        let (bytes, size) = (rounded_bytes(&values, dtype)?, values.dim(1)? / heads);
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
