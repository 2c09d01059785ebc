//! Writing keys and values into the paged KV cache.

use crate::{
    floats::{FloatFrame, FloatRows, Floats, FloatsMut},
    kernel::Kernel,
    parallel::Worker,
};
use dsrun_core::{
    Result,
    op::{KvWrite, LatentWrite},
};
use dsrun_host::{Frame, Tensor};

impl Kernel for KvWrite {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let slots = frame.input::<i32>(4)?;
        for index in 0..2 {
            write(&frame.floats(2 + index)?, &mut frame.floats_mut(index)?, 0, &slots, worker);
        }
        Ok(())
    }
}

impl Kernel for LatentWrite {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (value, rest) = (frame.floats(1)?, frame.floats(2)?);
        let (slots, mut cache) = (frame.input::<i32>(3)?, frame.floats_mut(0)?);
        let heads = cache.shape.get(1).copied().unwrap_or(1).max(1);
        // The values, and behind them the rest of the keys.
        write(&value, &mut cache, 0, &slots, worker);
        write(&rest, &mut cache, value.width() / heads, &slots, worker);
        Ok(())
    }
}

/// Writes rows into their slots of a cache, from element `offset` of a head on.
fn write(
    rows: &Tensor<'_, Floats<'_>>,
    cache: &mut Tensor<'_, FloatsMut<'_>>,
    offset: usize,
    slots: &Tensor<'_, &[i32]>,
    worker: &mut Worker<'_>,
) {
    let &[_, heads, block, _] = cache.shape else { return };
    let (limit, size) = (cache.rows.saturating_mul(block), rows.width() / heads.max(1));
    if size == 0 {
        return;
    }
    for row in 0..rows.rows.min(slots.rows) {
        let Some(slot) = slots.index(row, limit) else { continue };
        let [scratch] = worker.team.lane().split([rows.row_scratch()]);
        for (head, values) in rows.row(row, scratch).chunks_exact(size).take(heads).enumerate() {
            let places = [slot / block, head, slot % block];
            let start: usize = places.iter().zip(cache.strides).map(|(place, stride)| place * stride).sum();
            cache.data.store(start + offset, values);
        }
    }
}
