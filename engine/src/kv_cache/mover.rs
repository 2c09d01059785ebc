//! Moves pages as a scheduled step requires: to and from the store of pages, and the host memory of pre-empted requests.

use super::{
    lane::PageLane,
    page_key::PageKey,
    store::{PageStore, StoredPage, Tier},
    swap::SwapSpace,
};
use crate::{
    error::Result,
    plan::{PAGE_BATCH, StagedPages},
};
use dsrun_core::{
    Code, Error,
    device::{BufferSlice, Device, Event, MemoryKind, Stream},
};
use std::{
    collections::VecDeque,
    mem::discriminant,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

/// How long a copy of pages may take, the steps before it included.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Areas of pinned memory for pages on their way to and from the store.
const HOST_AREAS: usize = 4;

/// A page that moves before a step. Moves happen in their order.
#[derive(Clone, Debug)]
pub(crate) enum PageMove {
    /// A page is copied to a tier of the store.
    Save(i32, PageKey, Tier),
    /// A page is filled from the store.
    Load(StoredPage, i32),
    /// A page is copied to a page of host memory.
    SwapOut(i32, u32),
    /// A page is filled from a page of host memory.
    SwapIn(u32, i32),
}

/// What moves pages.
#[derive(Debug)]
pub(crate) struct PageMover {
    swap: Option<SwapSpace>,
    store: Option<(Arc<PageStore>, HostAreas)>,
    lane: PageLane,
}

/// Areas of pinned memory, each for a batch of pages.
#[derive(Debug)]
struct HostAreas {
    areas: Vec<HostArea>,
    /// Areas that are not in use. The thread of the store returns those that it has read.
    free: Receiver<usize>,
    returns: Sender<usize>,
    /// Areas that are copied to the device, the oldest first.
    loading: VecDeque<usize>,
}

#[derive(Clone, Debug)]
struct HostArea {
    memory: BufferSlice,
    /// Recorded after the copy to or from the device.
    copied: Arc<dyn Event>,
}

/// Returns an area when it is dropped.
struct Returned(usize, Sender<usize>);

impl Drop for Returned {
    fn drop(&mut self) {
        // Nobody wants it if the engine has ended.
        let _ = self.1.send(self.0);
    }
}

impl PageMover {
    /// A mover of pages between these places.
    ///
    /// # Errors
    /// If there is too little memory, or the host cannot access pinned memory, which the store needs.
    pub(crate) fn new(
        device: &dyn Device,
        lane: PageLane,
        swap: Option<SwapSpace>,
        store: Option<Arc<PageStore>>,
    ) -> Result<Self> {
        let areas = |store| Ok::<_, crate::EngineError>((store, HostAreas::new(device, lane.layout())?));
        let store = store.map(areas).transpose()?;
        Ok(Self { swap, store, lane })
    }

    /// The store.
    pub(crate) fn store(&self) -> Option<&PageStore> {
        self.store.as_ref().map(|(store, _)| &**store)
    }

    /// Enqueues moves. `stream` is that of the steps.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn run(&mut self, stream: &mut dyn Stream, moves: &[PageMove]) -> Result<()> {
        for run in moves.chunk_by(|a, b| discriminant(a) == discriminant(b)) {
            run.chunks(PAGE_BATCH).try_for_each(|batch| self.run_batch(stream, batch))?;
        }
        Ok(())
    }

    /// Enqueues moves of one kind.
    fn run_batch(&mut self, stream: &mut dyn Stream, moves: &[PageMove]) -> Result<()> {
        let Self { swap, store, lane } = self;
        let (mut saved, mut loaded, mut out, mut back) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for page in moves {
            match page {
                PageMove::Save(page, key, tier) => saved.push((*page, (*key, *tier))),
                PageMove::Load(stored, page) => loaded.push((*page, stored)),
                PageMove::SwapOut(page, host_page) => out.push((*page, *host_page)),
                PageMove::SwapIn(host_page, page) => back.push((*page, *host_page)),
            }
        }
        if let Some(swap) = swap {
            if !out.is_empty() {
                swap.swap_out(lane, stream, &out)?;
            }
            if !back.is_empty() {
                swap.swap_in(lane, stream, &back)?;
            }
        }
        if let Some((store, areas)) = store {
            if !saved.is_empty() {
                areas.save(lane, stream, store, &saved)?;
            }
            if !loaded.is_empty() {
                areas.load(lane, stream, &loaded)?;
            }
        }
        Ok(())
    }
}

impl Drop for PageMover {
    /// Waits for copies to the store, while their streams live.
    fn drop(&mut self) {
        if let Some((store, _)) = &self.store {
            store.finish();
        }
    }
}

impl HostAreas {
    fn new(device: &dyn Device, layout: &StagedPages) -> Result<Self> {
        let (returns, free) = channel();
        let mut areas = Vec::with_capacity(HOST_AREAS);
        for number in 0..HOST_AREAS {
            let memory = BufferSlice::whole(device.allocate(layout.bytes().max(1), MemoryKind::Pinned)?);
            if memory.buffer.host_pointer().is_none() {
                let message = "the prefix cache cannot be kept outside the device: the host cannot access its pinned memory";
                return Err(Error::unsupported(message).into());
            }
            areas.push(HostArea { memory, copied: device.event()? });
            // The receiver is there.
            let _ = returns.send(number);
        }
        Ok(Self { areas, free, returns, loading: VecDeque::new() })
    }

    /// An area that is not in use; waits for one if there is none.
    fn take(&mut self) -> Result<usize> {
        if let Ok(free) = self.free.try_recv() {
            return Ok(free);
        }
        if let Some(loading) = self.loading.pop_front() {
            self.areas[loading].copied.synchronize("cached pages that are copied to the device", TIMEOUT)?;
            return Ok(loading);
        }
        Ok(self.free.recv_timeout(TIMEOUT).map_err(|_| {
            let message = format!("waited {TIMEOUT:?} for cached pages that are copied from the device");
            Error::new(Code::Timeout, message)
        })?)
    }

    /// Copies a batch of pages to the store.
    fn save(
        &mut self,
        lane: &mut PageLane,
        stream: &mut dyn Stream,
        store: &PageStore,
        batch: &[(i32, (PageKey, Tier))],
    ) -> Result<()> {
        let number = self.take()?;
        let (area, returned) = (self.areas[number].clone(), Returned(number, self.returns.clone()));
        let pages: Vec<i32> = batch.iter().map(|(page, _)| *page).collect();
        let (layout, count) = (lane.layout().clone(), pages.len());
        lane.move_out(stream, &pages, |copying, staging| {
            for part in layout.parts(count) {
                let from = staging.slice(part.start, part.len())?;
                copying.copy(&from, &area.memory.slice(part.start, part.len())?)?;
            }
            Ok(copying.record(&*area.copied)?)
        })?;
        let incoming = move || {
            area.copied.synchronize("cached pages that are copied from the device", TIMEOUT)?;
            // SAFETY: the copy into the area has completed, and the area is not used again before `returned` is dropped.
            let bytes = unsafe { area.bytes()?.as_ref() };
            let page = |page: usize| {
                let parts =
                    (0..layout.caches().len()).map(|cache| &bytes[layout.range(cache, page..page + 1)]);
                Arc::new(parts.collect::<Vec<_>>().concat())
            };
            let pages = (0..count).map(page).collect();
            drop(returned);
            Ok(pages)
        };
        store.save(batch.iter().map(|(_, page)| *page).collect(), Box::new(incoming));
        Ok(())
    }

    /// Fills a batch of pages.
    fn load(
        &mut self,
        lane: &mut PageLane,
        stream: &mut dyn Stream,
        batch: &[(i32, &StoredPage)],
    ) -> Result<()> {
        let number = self.take()?;
        let area = self.areas[number].clone();
        let pages: Vec<i32> = batch.iter().map(|(page, _)| *page).collect();
        let layout = lane.layout().clone();
        {
            // SAFETY: `take` returned the area, so no copy and no other thread uses it.
            let bytes = unsafe { area.bytes()?.as_mut() };
            for (page, (_, stored)) in batch.iter().enumerate() {
                let mut rest = &stored.bytes[..];
                for cache in 0..layout.caches().len() {
                    let to = &mut bytes[layout.range(cache, page..page + 1)];
                    let short = || Error::internal("a stored page is too short");
                    let (part, others) = rest.split_at_checked(to.len()).ok_or_else(short)?;
                    to.copy_from_slice(part);
                    rest = others;
                }
            }
        }
        lane.move_in(stream, &pages, |copying, staging| {
            for part in layout.parts(pages.len()) {
                let to = staging.slice(part.start, part.len())?;
                copying.copy(&area.memory.slice(part.start, part.len())?, &to)?;
            }
            Ok(copying.record(&*area.copied)?)
        })?;
        self.loading.push_back(number);
        Ok(())
    }
}

impl HostArea {
    /// The memory of the area, as long as the area lives.
    fn bytes(&self) -> Result<std::ptr::NonNull<[u8]>, Error> {
        let address = self.memory.buffer.host_pointer();
        let address = address.ok_or_else(|| Error::internal("pinned memory has no address any more"))?;
        Ok(std::ptr::NonNull::slice_from_raw_parts(address, self.memory.bytes))
    }
}
