//! The paged KV cache: writing keys and values, moving pages.

use crate::{
    kernels::Kernel,
    parallel::Worker,
    view::{Bytes, FloatsMut, Frame, Tensor},
};
use dsrun_core::{
    Result,
    op::{KvWrite, PageCopy, PageGather, PageScatter},
};

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

/// The runs of elements of a page: where each starts from the page's start, in order, and how long they are.
struct Page {
    heads: usize,
    block: usize,
    size: usize,
    strides: [usize; 2],
}

impl Page {
    fn of<D>(cache: &Tensor<'_, D>) -> Self {
        let mut page = Self { heads: 0, block: 0, size: 0, strides: [0; 2] };
        if let (&[_, heads, block, size], &[_, head_stride, slot_stride, _]) = (cache.shape, cache.strides) {
            page = Self { heads, block, size, strides: [head_stride, slot_stride] };
            if slot_stride == size {
                // Slots follow each other without gaps: a head is one run.
                page = Self { block: 1, size: block * size, ..page };
            }
        }
        page
    }

    /// For each run: where it starts in the cache's page, and where in a flattened page.
    fn runs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let count = if self.size == 0 { 0 } else { self.heads * self.block };
        (0..count).map(|run| {
            let (head, slot) = (run / self.block, run % self.block);
            (head * self.strides[0] + slot * self.strides[1], run * self.size)
        })
    }
}

impl Kernel for PageCopy {
    fn run(&self, frame: &Frame<'_>, _: &mut Worker<'_>) -> Result<()> {
        let (pairs, mut cache) = (frame.input::<i32>(1)?, frame.bytes_mut(0)?);
        let page = Page::of(&cache);
        let inside = |index: i32| usize::try_from(index).ok().filter(|index| *index < cache.rows);
        for row in 0..pairs.rows {
            let &[source, destination] = pairs.row(row) else { continue };
            let (Some(source), Some(destination)) = (inside(source), inside(destination)) else { continue };
            let (source, destination) = (cache.row_start(source), cache.row_start(destination));
            for (offset, _) in page.runs() {
                cache.data.copy_within(source + offset, destination + offset, page.size);
            }
        }
        Ok(())
    }
}

/// Calls `copy` with a page of the cache and a row of the plane, for every index that is inside.
fn for_each_page<D, E>(
    cache: &mut Tensor<'_, Bytes<D>>,
    plane: &mut Tensor<'_, Bytes<E>>,
    pages: &Tensor<'_, &[i32]>,
    mut copy: impl FnMut(&mut Bytes<D>, usize, &mut Bytes<E>, usize, usize),
) {
    let page = Page::of(cache);
    for row in 0..plane.rows.min(pages.rows) {
        let Some(index) = pages.index(row, cache.rows) else { continue };
        let (page_start, row_start) = (cache.row_start(index), plane.row_start(row));
        for (offset, flat) in page.runs() {
            copy(&mut cache.data, page_start + offset, &mut plane.data, row_start + flat, page.size);
        }
    }
}

impl Kernel for PageGather {
    fn run(&self, frame: &Frame<'_>, _: &mut Worker<'_>) -> Result<()> {
        let (mut cache, pages, mut y) = (frame.bytes(0)?, frame.input::<i32>(1)?, frame.bytes_mut(0)?);
        for_each_page(&mut cache, &mut y, &pages, |cache, source, y, destination, count| {
            y.range_mut(destination, count).copy_from_slice(cache.range(source, count));
        });
        Ok(())
    }
}

impl Kernel for PageScatter {
    fn run(&self, frame: &Frame<'_>, _: &mut Worker<'_>) -> Result<()> {
        let (mut x, pages, mut cache) = (frame.bytes(1)?, frame.input::<i32>(2)?, frame.bytes_mut(0)?);
        for_each_page(&mut cache, &mut x, &pages, |cache, destination, x, source, count| {
            cache.range_mut(destination, count).copy_from_slice(x.range(source, count));
        });
        Ok(())
    }
}
