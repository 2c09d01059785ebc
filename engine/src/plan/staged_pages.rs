//! How pages of the KV cache lie in memory while they move between the device and the host.

use crate::error::Result;
use dsrun_core::TensorDesc;
use std::ops::Range;

/// The maximum number of pages that are moved at a time.
pub(crate) const PAGE_BATCH: usize = 16;
/// Staging areas on the device: while one is copied, the next one is filled.
pub(crate) const STAGING_AREAS: usize = 4;
/// What the part of each cache is aligned to in a staging area.
const ALIGNMENT: usize = 256;

/// How a batch of pages lies in a staging area: the pages of the first cache, then those of the second, and so on.
#[derive(Clone, Debug)]
pub(crate) struct StagedPages {
    /// The bytes of a page in each cache.
    page_bytes: Vec<usize>,
    /// Where the part of each cache begins.
    offsets: Vec<usize>,
    bytes: usize,
}

impl StagedPages {
    /// The layout for pages of these bytes in each cache.
    pub(crate) fn new(page_bytes: Vec<usize>) -> Self {
        let mut bytes = 0;
        let place = |page: &usize| {
            let offset = bytes;
            bytes += (PAGE_BATCH * page).next_multiple_of(ALIGNMENT);
            offset
        };
        let offsets = page_bytes.iter().map(place).collect();
        Self { page_bytes, offsets, bytes }
    }

    /// The layout for pages of these caches.
    ///
    /// # Errors
    /// If a size overflows.
    pub(crate) fn of_caches<'a>(caches: impl Iterator<Item = &'a TensorDesc>) -> Result<Self> {
        Ok(Self::new(caches.map(page_bytes).collect::<Result<_>>()?))
    }

    /// Bytes of an area.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of a page in all caches.
    pub(crate) fn page_bytes(&self) -> usize {
        self.page_bytes.iter().sum()
    }

    /// The bytes of a page in each cache.
    pub(crate) fn caches(&self) -> &[usize] {
        &self.page_bytes
    }

    /// Where the pages `pages` of a batch are in the part of a cache.
    pub(crate) fn range(&self, cache: usize, pages: Range<usize>) -> Range<usize> {
        let (start, page) = (self.offsets[cache], self.page_bytes[cache]);
        start + pages.start * page..start + pages.end * page
    }

    /// The parts of an area that have to be copied for the first `count` pages of a batch: all at once where most of it is used.
    pub(crate) fn parts(&self, count: usize) -> Vec<Range<usize>> {
        match 2 * count > PAGE_BATCH {
            true => std::iter::once(0..self.bytes).collect(),
            false => (0..self.page_bytes.len()).map(|cache| self.range(cache, 0..count)).collect(),
        }
    }
}

/// The bytes of one page of a cache.
///
/// # Errors
/// If the size overflows.
pub(crate) fn page_bytes(cache: &TensorDesc) -> Result<usize> {
    Ok(cache.bytes()? / cache.shape.first().copied().unwrap_or(1).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_few_pages_are_copied_cache_by_cache() {
        let layout = StagedPages::new(vec![8, 24]);
        assert_eq!((layout.page_bytes(), layout.bytes()), (32, 256 + 512));
        assert_eq!((layout.range(0, 0..PAGE_BATCH), layout.range(1, 2..3)), (0..128, 304..328));
        assert_eq!(layout.parts(3), [0..24, 256..328]);
        assert_eq!((layout.parts(PAGE_BATCH).len(), layout.parts(PAGE_BATCH)[0].clone()), (1, 0..768));
    }
}
