//! Calls on i8 caches that run wrongly.

use crate::{
    change::{copied, operand, result},
    tensor::Copied,
    wrap::Run,
};
use dsrun_core::{DType, Result, cache_row::CACHE_SCALE_BYTES, device::Stream};

/// The first index of the scale of each row of an i8 cache; none for other caches.
fn scales(cache: &Copied) -> Vec<usize> {
    let row = cache.desc.shape.last().copied().unwrap_or(0);
    if cache.desc.dtype != DType::I8 || row < CACHE_SCALE_BYTES {
        return Vec::new();
    }
    (0..cache.count()).step_by(row).map(|first| first + row - CACHE_SCALE_BYTES).collect()
}

/// The scales of keys are taken for 1.
pub(crate) fn cache_scale_ignored(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    operand(run, stream, "paged_attention", 1, |_, keys| {
        for first in scales(keys) {
            let bytes = 1f32.to_le_bytes();
            bytes.into_iter().enumerate().for_each(|(at, byte)| keys.set_bits(first + at, byte.into()));
        }
    })
}

/// Every value has the scale of the row behind it.
pub(crate) fn cache_scale_of_next_row(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    operand(run, stream, "paged_attention", 2, |_, values| {
        let (before, scales) = (values.clone(), scales(values));
        for (first, next) in scales.iter().zip(scales.iter().skip(1)) {
            (0..CACHE_SCALE_BYTES).for_each(|at| values.set_bits(first + at, before.bits(next + at)));
        }
    })
}

/// Keys are cut off to integers instead of rounded.
pub(crate) fn cache_quantised_down(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    if run.op() != "kv_write" {
        return run.right(stream);
    }
    let (Some(keys), Some(slots)) = (copied(run, stream, 2)?, copied(run, stream, 4)?) else {
        return run.right(stream);
    };
    result(run, stream, "kv_write", 0, |_, cache| {
        let &[pages, heads, block, row] = &cache.desc.shape[..] else { return };
        if cache.desc.dtype != DType::I8 {
            return;
        }
        let size = row - CACHE_SCALE_BYTES;
        for token in 0..slots.count() {
            let Ok(slot) = usize::try_from(slots.integer(token)) else { continue };
            for head in (0..heads).filter(|_| slot < pages * block) {
                let value = |index: usize| keys.float((token * heads + head) * size + index);
                let scale = (0..size).fold(0f32, |largest, index| largest.max(value(index).abs())) / 127.0;
                let start = ((slot / block * heads + head) * block + slot % block) * row;
                for index in 0..size {
                    cache.set_bits(start + index, u32::from((value(index) / scale) as i8 as u8));
                }
            }
        }
    })
}
