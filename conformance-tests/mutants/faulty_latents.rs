//! Calls of latent attention that run wrongly.

use crate::{
    change::{copied, operand, result},
    wrap::Run,
};
use dsrun_core::{Result, device::Stream, op::Op};

/// Queries are zero where they meet the part of keys that is behind their values.
pub(crate) fn rest_not_scored(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Op::PagedAttention(op) = run.call.op else { return run.right(stream) };
    operand(run, stream, "paged_attention", 0, |_, query| {
        let head = query.width() / op.query_heads as usize;
        let rest = (0..query.count()).filter(|index| index % head >= op.value_size as usize);
        if op.value_size > 0 {
            rest.collect::<Vec<_>>().into_iter().for_each(|index| query.set_float(index, 0.0));
        }
    })
}

/// The parts of the keys that were written change places.
pub(crate) fn rest_before_value(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    if run.op() != "latent_write" {
        return run.right(stream);
    }
    let (Some(value), Some(slots)) = (copied(run, stream, 1)?, copied(run, stream, 3)?) else {
        return Ok(());
    };
    let slots: Vec<i32> = (0..slots.count()).map(|index| slots.integer(index)).collect();
    result(run, stream, "latent_write", 0, |run, cache| {
        let Some([pages, heads, block, size]) =
            run.operand(0).map(|cache| <[usize; 4]>::try_from(&cache.shape[..])).and_then(|shape| shape.ok())
        else {
            return;
        };
        let own = value.width() / heads;
        for slot in slots.into_iter().filter_map(|slot| usize::try_from(slot).ok()) {
            for head in (0..heads).filter(|_| slot < pages * block) {
                let start = ((slot / block * heads + head) * block + slot % block) * size;
                let before: Vec<u32> = (start..start + size).map(|index| cache.bits(index)).collect();
                let turned = before[own..].iter().chain(&before[..own]);
                turned.enumerate().for_each(|(place, bits)| cache.set_bits(start + place, *bits));
            }
        }
    })
}
