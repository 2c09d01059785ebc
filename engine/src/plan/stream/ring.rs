//! The ring buffer that streamed layers are copied to, and the copies.
//!
//! Two streams run concurrently. The copy stream waits until a slot is free, copies a layer to it in chunks, and records the
//! slot's `full` event. The compute stream waits for `full`, runs the layer, and records the slot's `free` event. As soon as a
//! layer is launched, the copy of the next layer for its slot is enqueued. After the last layers of a step these are layers of
//! the next step, so copies continue across steps.

use super::{
    choice::StreamPlan,
    images::{DiskReads, LayerImages, WeightImages},
    streamed_layer::PlacedWeight,
};
use crate::error::Result;
use dsrun_core::{
    device::{BufferSlice, Device, Event, MemoryKind, Stream},
    kernels::{PackedWeight, WeightDesc},
};
use std::{collections::HashMap, sync::Arc};

/// Bytes of one copy. A step's uploads queue behind the copy in progress, so copies are only as large as needed to saturate the
/// link.
const PIECE: usize = 16 << 20;

/// The weights of streamed layers to bind calls to, by name.
#[derive(Debug, Default)]
pub(crate) struct StreamedWeights {
    /// In the slots of the ring.
    pub(crate) in_slots: HashMap<String, Arc<dyn PackedWeight>>,
    /// In host memory, for steps that read them there; empty if none does.
    pub(crate) in_place: HashMap<String, Arc<dyn PackedWeight>>,
}

/// The ring buffer of slots on the device, and the stream that fills it.
#[derive(Debug)]
pub(crate) struct WeightRing {
    copies: Box<dyn Stream>,
    slots: Vec<Slot>,
    images: LayerImages,
    /// The number of each streamed weight's layer, by the name of the weight.
    numbers: HashMap<String, usize>,
    /// The layer that runs next.
    next: usize,
    /// Bytes whose copy was enqueued.
    copied: u64,
}

#[derive(Debug)]
struct Slot {
    memory: BufferSlice,
    /// Recorded after the copy of a layer.
    full: Arc<dyn Event>,
    /// Recorded after the calls that read the layer.
    free: Arc<dyn Event>,
    /// Whether `free` was ever recorded.
    used: bool,
}

impl WeightRing {
    /// Allocates the slots, and starts copying the first layers. All images must be complete. Returns the weights to bind calls to.
    ///
    /// # Errors
    /// If the device has too little memory, or cannot adopt packed weights.
    pub(crate) fn new(
        plan: &StreamPlan,
        images: WeightImages,
        device: &dyn Device,
    ) -> Result<(Self, StreamedWeights)> {
        let mut slots = Vec::with_capacity(plan.slots);
        for _ in 0..plan.slots {
            let memory = BufferSlice::whole(device.allocate(plan.slot_bytes.max(1), MemoryKind::Device)?);
            slots.push(Slot { memory, full: device.event()?, free: device.event()?, used: false });
        }
        let adopt = |weight: &PlacedWeight, desc: &WeightDesc, layer: &BufferSlice| -> Result<_> {
            let range = layer.slice(weight.offset, weight.bytes)?;
            let packed = device.kernels().adopt(desc, &range).map_err(|error| error.at(&weight.name))?;
            Ok((weight.name.clone(), packed))
        };
        let images = images.finish(plan, device)?;
        let mut adopted = StreamedWeights::default();
        for (number, layer) in plan.layers.iter().enumerate() {
            let slot = &slots[number % slots.len()];
            let host = images.in_host_memory(number).filter(|_| plan.most_tokens_in_place() > 0);
            for weight in &layer.weights {
                adopted.in_slots.extend([adopt(weight, &weight.desc, &slot.memory)?]);
                if let Some(host) = host {
                    let desc = WeightDesc { immutable: true, ..weight.desc.clone() };
                    adopted.in_place.extend([adopt(weight, &desc, host)?]);
                }
            }
        }
        let numbers = plan.numbers();
        let mut ring = Self { copies: device.stream()?, slots, images, numbers, next: 0, copied: 0 };
        ring.fill_from(0)?;
        Ok((ring, adopted))
    }

    /// The streamed layer of a weight.
    pub(crate) fn layer_of(&self, weight: &str) -> Option<usize> {
        self.numbers.get(weight).copied()
    }

    /// Bytes that were copied to the device so far.
    pub(crate) fn copied(&self) -> u64 {
        self.copied
    }

    /// What was read from disk so far, if layers are read from it.
    pub(crate) fn disk(&self) -> Option<DiskReads> {
        self.images.disk()
    }

    /// Makes the compute stream wait for the weights of a layer. If another layer was to run next, the slots are filled again from this one
    /// on: a segment of its own computes hidden states with the last layer, and a failed step leaves the ring in the middle of the layers.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn acquire(&mut self, layer: usize, stream: &mut dyn Stream) -> Result<()> {
        if layer != self.next {
            for slot in &mut self.slots {
                stream.record(&*slot.free)?;
                slot.used = true;
            }
            self.fill_from(layer)?;
        }
        Ok(stream.wait(&*self.slot(layer).full)?)
    }

    /// Records that the slot of a layer becomes free after the calls enqueued so far, and enqueues the copy of the next layer for
    /// this slot.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn release(&mut self, layer: usize, stream: &mut dyn Stream) -> Result<()> {
        let slots = self.slots.len();
        let slot = &mut self.slots[layer % slots];
        slot.used = true;
        stream.record(&*slot.free)?;
        self.next = (layer + 1) % self.images.count();
        self.fill((layer + slots) % self.images.count())
    }

    /// Enqueues the copies of this layer, which runs next, and of those after it.
    fn fill_from(&mut self, layer: usize) -> Result<()> {
        self.next = layer;
        (layer..layer + self.slots.len()).try_for_each(|layer| self.fill(layer % self.images.count()))
    }

    /// Enqueues the copy of a layer to its slot; the copy stream first waits until the slot is free.
    fn fill(&mut self, layer: usize) -> Result<()> {
        let slot = &self.slots[layer % self.slots.len()];
        if slot.used {
            self.copies.wait(&*slot.free)?;
        }
        let image = self.images.acquire(layer)?;
        let mut start = 0;
        while start < image.bytes {
            let bytes = PIECE.min(image.bytes - start);
            self.copies.copy(&image.slice(start, bytes)?, &slot.memory.slice(start, bytes)?)?;
            start += bytes;
        }
        self.copies.record(&*slot.full)?;
        self.images.release(&mut *self.copies)?;
        self.copied += image.bytes as u64;
        Ok(())
    }

    fn slot(&self, layer: usize) -> &Slot {
        &self.slots[layer % self.slots.len()]
    }
}
