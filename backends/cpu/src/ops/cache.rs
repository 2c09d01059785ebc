//! Writing keys and values into the paged KV cache.

use crate::{
    floats::{FloatFrame, FloatRows, FloatsMut},
    kernel::Kernel,
    parallel::Worker,
};
use dsrun_core::{Result, op::KvWrite};
use dsrun_host::{Frame, Tensor};

impl Kernel for KvWrite {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let slots = frame.input::<i32>(4)?;
        for index in 0..2 {
            let (rows, mut cache) = (frame.floats(2 + index)?, frame.floats_mut(index)?);
            let &[_, heads, block, size] = cache.shape else { continue };
            let limit = cache.rows.saturating_mul(block);
            if size == 0 {
                continue;
            }
            for row in 0..rows.rows.min(slots.rows) {
                let Some(slot) = slots.index(row, limit) else { continue };
                let [scratch] = worker.team.lane().split([rows.row_scratch()]);
                for (head, values) in rows.row(row, scratch).chunks_exact(size).take(heads).enumerate() {
                    store(&mut cache, [slot / block, head, slot % block], values);
                }
            }
        }
        Ok(())
    }
}

fn store(cache: &mut Tensor<'_, FloatsMut<'_>>, index: [usize; 3], values: &[f32]) {
    let start = index.iter().zip(cache.strides).map(|(index, stride)| index * stride).sum();
    cache.data.store(start, values);
}
