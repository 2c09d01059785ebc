//! The ring buffer that streamed layers are copied to, and the copies.
//!
//! Two streams run concurrently. The copy stream waits until a slot is free, copies a layer to it in chunks, and records the
//! slot's `full` event. The compute stream waits for `full`, runs the layer, and records the slot's `free` event. As soon as a
//! layer is launched, the copy of the next layer for its slot is enqueued. After the last layers of a step these are layers of
//! the next step, so copies continue across steps.

use super::choice::{PlacedWeight, StreamPlan, StreamedLayer};
use crate::{error::Result, memory::Bytes};
use dsrun_core::{
    Code, Error,
    device::{BufferSlice, Device, Event, MemoryKind, Stream},
    kernels::PackedWeight,
};
use std::{collections::HashMap, sync::Arc};

/// Bytes of one copy. A step's uploads queue behind the copy in progress, so copies are only as large as needed to saturate the
/// link.
const PIECE: usize = 16 << 20;

/// The packed weights of streamed layers in pinned host memory.
#[derive(Debug)]
pub(crate) struct WeightImages {
    layers: Vec<Image>,
    /// The position of each weight: the index of its layer, and of the weight in the layer.
    places: HashMap<String, (usize, usize)>,
}

#[derive(Debug)]
struct Image {
    memory: Option<BufferSlice>,
    bytes: usize,
    weights: Vec<PlacedWeight>,
}

impl WeightImages {
    /// Makes the images of the layers of a plan. Nothing is allocated yet.
    pub(crate) fn new(plan: &StreamPlan) -> Self {
        let mut places = HashMap::new();
        for (number, layer) in plan.layers.iter().enumerate() {
            let weights = layer.weights.iter().enumerate();
            places.extend(weights.map(|(place, weight)| (weight.name.clone(), (number, place))));
        }
        let image = |layer: &StreamedLayer| Image {
            memory: None,
            bytes: layer.bytes,
            weights: layer.weights.clone(),
        };
        Self { layers: plan.layers.iter().map(image).collect(), places }
    }

    /// Whether a weight is streamed.
    pub(crate) fn has(&self, weight: &str) -> bool {
        self.places.contains_key(weight)
    }

    /// Enqueues the copy of a packed weight to its place in host memory.
    ///
    /// # Errors
    /// If host memory cannot be pinned, or the device failed.
    pub(crate) fn store(
        &mut self,
        name: &str,
        packed: &Arc<dyn PackedWeight>,
        device: &dyn Device,
        stream: &mut dyn Stream,
    ) -> Result<()> {
        let missing = || Error::internal("is not streamed").at(name);
        let (layer, place) = self.places.get(name).copied().ok_or_else(missing)?;
        let count = self.layers.len();
        let image = &mut self.layers[layer];
        let memory = match &image.memory {
            Some(memory) => memory,
            None => {
                let pinned = device.allocate(image.bytes.max(1), MemoryKind::Pinned);
                let pinned = pinned.map_err(|error| cannot_pin(&error, layer, count, image.bytes))?;
                image.memory.insert(BufferSlice::whole(pinned))
            }
        };
        let PlacedWeight { offset, bytes, .. } = image.weights[place];
        device.kernels().copy_packed(stream, packed, &memory.slice(offset, bytes)?)?;
        Ok(())
    }
}

/// The error for host memory that cannot be pinned. The driver reports it as out of memory, as if device memory were short.
fn cannot_pin(error: &Error, layer: usize, layers: usize, bytes: usize) -> Error {
    let message = format!(
        "{} of host memory for the weights of layer {} of {layers} cannot be pinned: {}\nhint: free host memory, raise the limit on \
         locked memory (ulimit -l), quantise the weights, or keep more layers on the device with a larger --gpu-memory",
        Bytes(bytes as u64),
        layer + 1,
        error.message()
    );
    Error::new(Code::OutOfMemory, message)
}

/// Packed weights, each with its name.
type NamedWeights = Vec<(String, Arc<dyn PackedWeight>)>;

/// The ring buffer of slots on the device, and the stream that fills it.
#[derive(Debug)]
pub(crate) struct WeightRing {
    copies: Box<dyn Stream>,
    slots: Vec<Slot>,
    images: Vec<BufferSlice>,
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
    /// Allocates the slots, and starts copying the first layers. All images must be complete. Returns the weights to bind calls
    /// to, by name.
    ///
    /// # Errors
    /// If the device has too little memory, or cannot adopt packed weights.
    pub(crate) fn new(
        plan: &StreamPlan,
        images: WeightImages,
        device: &dyn Device,
    ) -> Result<(Self, NamedWeights)> {
        let mut slots = Vec::with_capacity(plan.slots);
        for _ in 0..plan.slots {
            let memory = BufferSlice::whole(device.allocate(plan.slot_bytes.max(1), MemoryKind::Device)?);
            slots.push(Slot { memory, full: device.event()?, free: device.event()?, used: false });
        }
        let (mut adopted, mut memory) = (Vec::new(), Vec::new());
        for (number, image) in images.layers.into_iter().enumerate() {
            let slot = &slots[number % slots.len()];
            for weight in image.weights {
                let range = slot.memory.slice(weight.offset, weight.bytes)?;
                let packed = device.kernels().adopt(&weight.desc, &range);
                adopted.push((weight.name.clone(), packed.map_err(|error| error.at(&weight.name))?));
            }
            memory.push(image.memory.ok_or_else(|| Error::internal("a streamed layer was not loaded"))?);
        }
        let numbers = plan.numbers();
        let mut ring = Self { copies: device.stream()?, slots, images: memory, numbers, next: 0, copied: 0 };
        ring.prime()?;
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

    /// Makes the compute stream wait for the weights of a layer.
    ///
    /// # Errors
    /// If layers do not run in their order, which is a defect; if the device failed.
    pub(crate) fn acquire(&mut self, layer: usize, stream: &mut dyn Stream) -> Result<()> {
        if layer != self.next {
            // A failed step has left the ring in the middle of the layers, so it is refilled from the first layer.
            if layer != 0 {
                let message =
                    format!("streamed layer {layer} runs out of order, expected layer {}", self.next);
                return Err(Error::internal(message).into());
            }
            for slot in &mut self.slots {
                stream.record(&*slot.free)?;
                slot.used = true;
            }
            self.prime()?;
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
        self.next = (layer + 1) % self.images.len();
        self.fill((layer + slots) % self.images.len())
    }

    /// Enqueues the copies of the first layers.
    fn prime(&mut self) -> Result<()> {
        self.next = 0;
        (0..self.slots.len()).try_for_each(|layer| self.fill(layer))
    }

    /// Enqueues the copy of a layer to its slot; the copy stream first waits until the slot is free.
    fn fill(&mut self, layer: usize) -> Result<()> {
        let slot = &self.slots[layer % self.slots.len()];
        if slot.used {
            self.copies.wait(&*slot.free)?;
        }
        let image = &self.images[layer];
        let mut start = 0;
        while start < image.bytes {
            let bytes = PIECE.min(image.bytes - start);
            self.copies.copy(&image.slice(start, bytes)?, &slot.memory.slice(start, bytes)?)?;
            start += bytes;
        }
        self.copies.record(&*slot.full)?;
        self.copied += image.bytes as u64;
        Ok(())
    }

    fn slot(&self, layer: usize) -> &Slot {
        &self.slots[layer % self.slots.len()]
    }
}
