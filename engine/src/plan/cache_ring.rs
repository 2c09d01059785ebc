//! The slots on the device for keys and values that are kept in host memory, and the copies to and from them.
//!
//! Steps that [read caches in place](super::host_caches::reads_caches_in_place) do not use them. In other steps three streams run
//! concurrently:
//!
//! | fetching stream | compute stream | saving stream |
//! |---|---|---|
//! | waits for the steps before, and until the slot is saved | | |
//! | copies the pages that the layer reads, records `full` | | |
//! | | waits for `full`, runs the layer, records `done` | |
//! | | | waits for `done`, copies the pages that were written back, records `saved` |
//!
//! At the end of a step the compute stream waits until all is saved, so all work that is enqueued later finds the caches in host memory
//! complete.

use super::host_caches::HostCaches;
use crate::error::Result;
use dsrun_core::{
    Error,
    device::{BufferSlice, Device, Event, MemoryKind, Stream},
};
use std::{
    collections::{BTreeSet, HashMap},
    ops::Range,
    sync::Arc,
};

/// The pages of the KV cache that a step reads and writes.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct StepPages {
    /// Pages with tokens of earlier steps.
    read: BTreeSet<u32>,
    /// Pages that get tokens.
    written: BTreeSet<u32>,
}

impl StepPages {
    /// Removes all pages.
    pub(crate) fn clear(&mut self) {
        self.read.clear();
        self.written.clear();
    }

    /// Adds the pages of a sequence that gets `tokens` tokens after the first `before`. Its pages have room for `block` tokens each.
    pub(crate) fn add(&mut self, pages: &[i32], block: usize, before: usize, tokens: usize) {
        let numbers = |pages: Option<&[i32]>| {
            let pages = pages.unwrap_or_default().iter();
            pages.filter_map(|page| u32::try_from(*page).ok()).collect::<Vec<_>>()
        };
        let count = |tokens: usize| tokens.div_ceil(block.max(1)).min(pages.len());
        self.read.extend(numbers(pages.get(..count(before))));
        self.written
            .extend(numbers(pages.get((before / block.max(1)).min(pages.len())..count(before + tokens))));
    }
}

/// Neighbouring pages as ranges, each copied at once.
fn runs(pages: &BTreeSet<u32>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for page in pages.iter().map(|page| *page as usize) {
        match runs.last_mut() {
            Some(run) if run.end == page => run.end += 1,
            _ => runs.push(page..page + 1),
        }
    }
    runs
}

/// The slots, and the streams that fill and save them.
#[derive(Debug)]
pub(crate) struct CacheRing {
    fetches: Box<dyn Stream>,
    saves: Box<dyn Stream>,
    /// The caches of each layer, in the order of a step.
    layers: Vec<Vec<Cache>>,
    slots: Vec<Slot>,
    /// The layer of each cache, by name.
    numbers: HashMap<String, usize>,
    /// Recorded by the compute stream when a step begins.
    begun: Arc<dyn Event>,
    /// The layer that runs next.
    next: usize,
    /// The pages that the step reads and writes.
    read: Vec<Range<usize>>,
    written: Vec<Range<usize>>,
    /// Bytes that were copied to the device.
    copied: u64,
}

/// A cache in host memory, and its place in a slot.
#[derive(Debug)]
struct Cache {
    host: BufferSlice,
    slot: BufferSlice,
    page_bytes: usize,
}

#[derive(Debug)]
struct Slot {
    full: Arc<dyn Event>,
    done: Arc<dyn Event>,
    saved: Arc<dyn Event>,
    /// Whether copies from the slot were enqueued that the compute stream does not wait for yet.
    saving: bool,
}

impl CacheRing {
    /// Allocates the slots for caches of `pages` pages, which are in `host` memory. Returns where each cache is in its slot, by name.
    ///
    /// # Errors
    /// If the device has too little memory, or a cache has no memory on the host, which is a defect.
    pub(crate) fn new(
        plan: &HostCaches,
        pages: usize,
        host: &HashMap<String, BufferSlice>,
        device: &dyn Device,
    ) -> Result<(Self, HashMap<String, BufferSlice>)> {
        let memory = |name: &String| {
            let lacks = || Error::internal("a cache has no memory on the host").at(name);
            host.get(name).cloned().ok_or_else(lacks)
        };
        let alignment = device.properties().alignment.max(1);
        let padded = |name: &String| Ok::<_, Error>(memory(name)?.bytes.next_multiple_of(alignment));
        let of_layer = |names: &Vec<String>| names.iter().map(padded).sum::<Result<usize, _>>();
        let bytes = plan.layers.iter().map(of_layer).collect::<Result<Vec<_>, _>>()?;
        let bytes = bytes.into_iter().max().unwrap_or(0).max(1);
        let (mut memories, mut slots) = (Vec::new(), Vec::new());
        for _ in 0..plan.slots() {
            memories.push(BufferSlice::whole(device.allocate(bytes, MemoryKind::Device)?));
            slots.push(Slot {
                full: device.event()?,
                done: device.event()?,
                saved: device.event()?,
                saving: false,
            });
        }
        let (mut layers, mut in_slots) = (Vec::with_capacity(plan.layers.len()), HashMap::new());
        for (names, slot) in plan.layers.iter().zip(memories.iter().cycle()) {
            let (mut offset, mut caches) = (0, Vec::with_capacity(names.len()));
            for name in names {
                let host = memory(name)?;
                let place = slot.slice(offset, host.bytes)?;
                offset += padded(name)?;
                in_slots.insert(name.clone(), place.clone());
                caches.push(Cache { page_bytes: host.bytes / pages.max(1), host, slot: place });
            }
            layers.push(caches);
        }
        let ring = Self {
            fetches: device.stream()?,
            saves: device.stream()?,
            layers,
            slots,
            numbers: plan.numbers(),
            begun: device.event()?,
            next: 0,
            read: Vec::new(),
            written: Vec::new(),
            copied: 0,
        };
        Ok((ring, in_slots))
    }

    /// The layer of a cache.
    pub(crate) fn layer_of(&self, cache: &str) -> Option<usize> {
        self.numbers.get(cache).copied()
    }

    /// Bytes whose copy to the device was enqueued.
    pub(crate) fn copied(&self) -> u64 {
        self.copied
    }

    /// Begins a step that copies: starts copying the pages of the first layers.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn begin(&mut self, pages: &StepPages, compute: &mut dyn Stream) -> Result<()> {
        // A step that failed may have left copies behind.
        self.settle(compute)?;
        (self.read, self.written) = (runs(&pages.read), runs(&pages.written));
        self.next = 0;
        compute.record(&*self.begun)?;
        self.fetches.wait(&*self.begun)?;
        (0..self.slots.len()).try_for_each(|layer| self.fetch(layer))
    }

    /// Makes the compute stream wait for the pages of a layer. After the last layer, those that are still in their slots may be used again:
    /// hidden states are computed from the last one by a segment of its own.
    ///
    /// # Errors
    /// If layers do not run in their order, which is a defect; if the device failed.
    pub(crate) fn acquire(&mut self, layer: usize, compute: &mut dyn Stream) -> Result<()> {
        let again = self.next == self.layers.len() && layer + self.slots.len() >= self.next;
        if layer != self.next && !again {
            let message =
                format!("the KV cache of layer {layer} is used out of order, expected {}", self.next);
            return Err(Error::internal(message).into());
        }
        Ok(compute.wait(&*self.slot(layer).full)?)
    }

    /// Enqueues the copies of the pages that the calls enqueued so far have written in a layer, and the copies of the next layer for its
    /// slot.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn release(&mut self, layer: usize, compute: &mut dyn Stream) -> Result<()> {
        self.next = self.next.max(layer + 1);
        let number = layer % self.slots.len();
        let slot = &mut self.slots[number];
        compute.record(&*slot.done)?;
        self.saves.wait(&*slot.done)?;
        for cache in &self.layers[layer] {
            for run in &self.written {
                let (from, bytes) = (run.start * cache.page_bytes, run.len() * cache.page_bytes);
                self.saves.copy(&cache.slot.slice(from, bytes)?, &cache.host.slice(from, bytes)?)?;
            }
        }
        self.saves.record(&*slot.saved)?;
        slot.saving = true;
        match layer + self.slots.len() {
            next if next < self.layers.len() => self.fetch(next),
            _ if self.next == self.layers.len() => self.settle(compute),
            _ => Ok(()),
        }
    }

    /// Enqueues the copies of the pages that a layer reads, as soon as its slot is saved.
    fn fetch(&mut self, layer: usize) -> Result<()> {
        let slot = &self.slots[layer % self.slots.len()];
        if slot.saving {
            self.fetches.wait(&*slot.saved)?;
        }
        for cache in &self.layers[layer] {
            for run in &self.read {
                let (from, bytes) = (run.start * cache.page_bytes, run.len() * cache.page_bytes);
                self.fetches.copy(&cache.host.slice(from, bytes)?, &cache.slot.slice(from, bytes)?)?;
                self.copied += bytes as u64;
            }
        }
        Ok(self.fetches.record(&*slot.full)?)
    }

    /// Makes the compute stream wait until all slots are saved.
    fn settle(&mut self, compute: &mut dyn Stream) -> Result<()> {
        for slot in self.slots.iter_mut().filter(|slot| slot.saving) {
            compute.wait(&*slot.saved)?;
            slot.saving = false;
        }
        Ok(())
    }

    fn slot(&self, layer: usize) -> &Slot {
        &self.slots[layer % self.slots.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_reads_pages_with_tokens_and_writes_those_that_get_some() {
        let mut pages = StepPages::default();
        // Five tokens after six, in pages of four: the second page is read and written.
        pages.add(&[7, 3, 8, 1], 4, 6, 5);
        assert_eq!((runs(&pages.read), runs(&pages.written)), (vec![3..4, 7..8], vec![3..4, 8..9]));
        // A new sequence at the border of a page, beside it.
        pages.add(&[2, 4, 5], 4, 4, 4);
        assert_eq!((runs(&pages.read), runs(&pages.written)), (vec![2..4, 7..8], vec![3..5, 8..9]));
        // Pages that a window has left are given away.
        pages.clear();
        pages.add(&[-1, 6, 8, 9, 11], 4, 12, 8);
        assert_eq!((runs(&pages.read), runs(&pages.written)), (vec![6..7, 8..9], vec![9..10, 11..12]));
        pages.clear();
        assert_eq!(pages, StepPages::default());
    }
}
