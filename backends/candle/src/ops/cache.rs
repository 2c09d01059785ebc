//! Writing keys and values into the paged KV cache.

use crate::{
    kernels::Kernel,
    tensor::{Result, operand, rounded_bytes, rows},
};
use dsrun_core::op::KvWrite;
use dsrun_host::Frame;

impl Kernel for KvWrite {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let slots = frame.input::<i32>(4)?;
        for (index, source) in [2, 3].into_iter().enumerate() {
            let rows = rows(frame, &[source, 4], &[]);
            let bytes = rounded_bytes(&operand(frame, source, rows)?, frame.result_dtype(index)?)?;
            let mut cache = frame.bytes_mut(index)?;
            let (heads, block, size) = (cache.shape[1], cache.shape[2], cache.shape[3]);
            let (page, head, slot) = (cache.strides[0], cache.strides[1], cache.strides[2]);
            // Slot s is slot s % B of page s / B.
            let head_bytes = size * cache.data.element();
            for row in 0..rows {
                let Some(index) = slots.index(row, cache.rows.saturating_mul(block)) else { continue };
                for number in 0..heads {
                    let start = index / block * page + number * head + index % block * slot;
                    let bytes = &bytes[(row * heads + number) * head_bytes..][..head_bytes];
                    cache.data.range_mut(start, size).copy_from_slice(bytes);
                }
            }
        }
        Ok(())
    }
}
