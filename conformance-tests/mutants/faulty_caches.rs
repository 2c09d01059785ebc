//! Calls on i8 caches that run wrongly.

use crate::{
    change::{copied, operand, result},
    tensor::Copied,
    wrap::Run,
};
use dsrun_core::{
    DType, Result,
    cache_row::{CACHE_GROUP, cache_head_size},
    device::Stream,
};
use std::ops::Range;

/// The indices of the scales of each row of an i8 cache; none for other caches.
fn scales(cache: &Copied) -> Vec<Range<usize>> {
    let row = cache.desc.shape.last().copied().unwrap_or(0);
    let Some(size) = cache_head_size(DType::I8, row).filter(|_| cache.desc.dtype == DType::I8 && row > 0)
    else {
        return Vec::new();
    };
    (0..cache.count()).step_by(row).map(|first| first + size..first + row).collect()
}

/// The scales of keys are taken for 1.
pub(crate) fn cache_scale_ignored(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    operand(run, stream, "paged_attention", 1, |_, keys| {
        for scales in scales(keys) {
            let ones = 1f32.to_le_bytes().into_iter().cycle();
            scales.zip(ones).for_each(|(index, byte)| keys.set_bits(index, byte.into()));
        }
    })
}

/// Every value has the scales of the row behind it.
pub(crate) fn cache_scale_of_next_row(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    operand(run, stream, "paged_attention", 2, |_, values| {
        let (before, scales) = (values.clone(), scales(values));
        for (own, next) in scales.iter().zip(scales.iter().skip(1)) {
            own.clone().zip(next.clone()).for_each(|(own, next)| values.set_bits(own, before.bits(next)));
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
        let Some(size) = cache_head_size(DType::I8, row).filter(|_| cache.desc.dtype == DType::I8) else {
            return;
        };
        for token in 0..slots.count() {
            let Ok(slot) = usize::try_from(slots.integer(token)) else { continue };
            for head in (0..heads).filter(|_| slot < pages * block) {
                let value = |index: usize| keys.float((token * heads + head) * size + index);
                let start = ((slot / block * heads + head) * block + slot % block) * row;
                for first in (0..size).step_by(CACHE_GROUP) {
                    let group = first..(first + CACHE_GROUP).min(size);
                    let scale =
                        group.clone().fold(0f32, |largest, index| largest.max(value(index).abs())) / 127.0;
                    for index in group {
                        cache.set_bits(start + index, u32::from((value(index) / scale) as i8 as u8));
                    }
                }
            }
        }
    })
}
