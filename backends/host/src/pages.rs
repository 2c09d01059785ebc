//! Moving pages of the KV cache.

use crate::{
    kernels::SharedOp,
    view::{Bytes, Frame, Tensor},
};
use dsrun_core::{
    Result,
    op::{PageGather, PageScatter},
};

/// The contiguous runs of elements that make up a page.
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
                // Slots follow one another without gaps: a head is one run.
                page = Self { block: 1, size: block * size, ..page };
            }
        }
        page
    }

    /// The start of each run in a page of the cache and in a flattened page.
    fn runs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let count = if self.size == 0 { 0 } else { self.heads * self.block };
        (0..count).map(|run| {
            let (head, slot) = (run / self.block, run % self.block);
            (head * self.strides[0] + slot * self.strides[1], run * self.size)
        })
    }
}

/// Calls `copy` for each run of a page of the cache and a row of `plane`, for every page index inside the cache.
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

impl SharedOp for PageGather {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let (mut cache, pages, mut y) = (frame.bytes(0)?, frame.input::<i32>(1)?, frame.bytes_mut(0)?);
        for_each_page(&mut cache, &mut y, &pages, |cache, source, y, destination, count| {
            y.range_mut(destination, count).copy_from_slice(cache.range(source, count));
        });
        Ok(())
    }
}

impl SharedOp for PageScatter {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let (mut x, pages, mut cache) = (frame.bytes(1)?, frame.input::<i32>(2)?, frame.bytes_mut(0)?);
        for_each_page(&mut cache, &mut x, &pages, |cache, destination, x, source, count| {
            cache.range_mut(destination, count).copy_from_slice(x.range(source, count));
        });
        Ok(())
    }
}
