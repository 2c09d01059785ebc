//! Host memory that pages of pre-empted requests are swapped to.

use super::lane::PageLane;
use crate::error::Result;
use dsrun_core::device::{BufferSlice, Device, MemoryKind, Stream};

/// The host memory of each cache.
#[derive(Debug)]
pub(crate) struct SwapSpace {
    caches: Vec<BufferSlice>,
}

impl SwapSpace {
    /// Allocates host memory for `host_pages` pages of every cache.
    ///
    /// # Errors
    /// If there is too little memory.
    pub(crate) fn new(device: &dyn Device, lane: &PageLane, host_pages: usize) -> Result<Self> {
        let allocate = |page_bytes: &usize| {
            let memory = device.allocate((page_bytes * host_pages).max(1), MemoryKind::Pinned)?;
            Ok(BufferSlice::whole(memory))
        };
        Ok(Self { caches: lane.layout().caches().iter().map(allocate).collect::<Result<_>>()? })
    }

    /// Copies a batch of pages, each with its number in host memory, out of the device.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn swap_out(
        &self,
        lane: &mut PageLane,
        stream: &mut dyn Stream,
        batch: &[(i32, u32)],
    ) -> Result<()> {
        let pages: Vec<i32> = batch.iter().map(|(page, _)| *page).collect();
        let copies = self.copies(lane, batch)?;
        lane.move_out(stream, &pages, |copying, staging| {
            copies
                .iter()
                .try_for_each(|(offset, host)| Ok(copying.copy(&staging.slice(*offset, host.bytes)?, host)?))
        })
    }

    /// Copies a batch of pages, each with its number in host memory, back to the device.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn swap_in(
        &self,
        lane: &mut PageLane,
        stream: &mut dyn Stream,
        batch: &[(i32, u32)],
    ) -> Result<()> {
        let pages: Vec<i32> = batch.iter().map(|(page, _)| *page).collect();
        let copies = self.copies(lane, batch)?;
        lane.move_in(stream, &pages, |copying, staging| {
            copies
                .iter()
                .try_for_each(|(offset, host)| Ok(copying.copy(host, &staging.slice(*offset, host.bytes)?)?))
        })
    }

    /// Splits a batch into runs of pages that are neighbours in host memory too: where each run is in a staging area, and in host
    /// memory.
    fn copies(&self, lane: &PageLane, batch: &[(i32, u32)]) -> Result<Vec<(usize, BufferSlice)>> {
        let layout = lane.layout();
        let mut copies = Vec::new();
        for (cache, memory) in self.caches.iter().enumerate() {
            let mut start = 0;
            for run in batch.chunk_by(|(_, before), (_, after)| before + 1 == *after) {
                let staged = layout.range(cache, start..start + run.len());
                start += run.len();
                let host = run[0].1 as usize * layout.caches()[cache];
                copies.push((staged.start, memory.slice(host, staged.len())?));
            }
        }
        Ok(copies)
    }
}
