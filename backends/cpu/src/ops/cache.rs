//! Writing keys and values into the paged KV cache.

use crate::{
    floats::{FloatFrame, FloatRows, Floats, FloatsMut},
    kernel::Kernel,
    parallel::Worker,
    simd,
};
use dsrun_core::{
    DType, Result,
    cache_row::{CACHE_GROUP, CACHE_SCALE_BYTES},
    op::{KvWrite, LatentWrite},
};
use dsrun_host::{Frame, Tensor};

impl Kernel for KvWrite {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let slots = frame.input::<i32>(4)?;
        for index in 0..2 {
            let rows = frame.floats(2 + index)?;
            if frame.result_dtype(index)? == DType::I8 {
                let cache = &mut frame.output::<i8>(index)?;
                write_heads(
                    &rows,
                    (cache.rows, cache.shape, cache.strides),
                    &slots,
                    worker,
                    |start, values| {
                        quantise(values, &mut cache.data[start..]);
                    },
                );
            } else {
                write(&rows, &mut frame.floats_mut(index)?, 0, &slots, worker);
            }
        }
        Ok(())
    }
}

/// Writes a row of an i8 cache: the bytes, and behind them the scale of each group.
fn quantise(values: &[f32], row: &mut [i8]) {
    let (bytes, scales) = row.split_at_mut(values.len());
    let groups = values.chunks(CACHE_GROUP).zip(bytes.chunks_mut(CACHE_GROUP));
    for ((values, bytes), out) in groups.zip(scales.as_chunks_mut::<CACHE_SCALE_BYTES>().0) {
        let scale = simd::quantise(values, bytes);
        // An infinite or NaN value makes all of its group NaN, so that it is not taken for a number.
        let scale = if values.iter().all(|value| value.is_finite()) { scale } else { f32::NAN };
        *out = bytemuck::cast(scale.to_le_bytes());
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
    write_heads(rows, (cache.rows, cache.shape, cache.strides), slots, worker, |start, values| {
        cache.data.store(start + offset, values);
    });
}

/// Calls `write` for each head of each row that has a slot, with the place of the head in the cache and its values.
fn write_heads(
    rows: &Tensor<'_, Floats<'_>>,
    (pages, shape, strides): (usize, &[usize], &[usize]),
    slots: &Tensor<'_, &[i32]>,
    worker: &mut Worker<'_>,
    mut write: impl FnMut(usize, &[f32]),
) {
    let &[_, heads, block, _] = shape else { return };
    let (limit, size) = (pages.saturating_mul(block), rows.width() / heads.max(1));
    if size == 0 {
        return;
    }
    for row in 0..rows.rows.min(slots.rows) {
        let Some(slot) = slots.index(row, limit) else { continue };
        let [scratch] = worker.team.lane().split([rows.row_scratch()]);
        for (head, values) in rows.row(row, scratch).chunks_exact(size).take(heads).enumerate() {
            let places = [slot / block, head, slot % block];
            write(places.iter().zip(strides).map(|(place, stride)| place * stride).sum(), values);
        }
    }
}
