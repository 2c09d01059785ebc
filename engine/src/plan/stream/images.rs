//! The packed weights of streamed layers outside the device: in pinned host memory, or in a file.
//!
//! [`WeightImages`] takes weights while a model is loaded. [`LayerImages`] gives layers to the ring while it runs.

use super::{
    choice::StreamPlan,
    packed_file::{Identity, Opened, PackedFile, PackedFileWriter},
    read_ahead::{ReadAhead, pinned_blocks},
    streamed_layer::PlacedWeight,
};
use crate::{error::Result, memory::Bytes};
use dsrun_core::{
    Code, Error,
    device::{BufferSlice, Device, MemoryKind, Stream},
    kernels::PackedWeight,
};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

/// How long a packed weight may take on its way to host memory.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Where the packed weights of streamed layers are put while a model is loaded.
#[derive(Debug)]
pub(crate) struct WeightImages {
    /// The position of each weight: the index of its layer, and of the weight in the layer.
    places: HashMap<String, (usize, usize)>,
    store: Store,
    /// Pinned memory for a packed weight on its way to a file.
    staging: Option<BufferSlice>,
    /// Types of weights of which one was packed again, to see that the backend still packs as it did when the file was written.
    compared: HashSet<String>,
}

#[derive(Debug)]
enum Store {
    /// Pinned host memory for each layer, allocated when its first weight comes.
    Host(Vec<Option<BufferSlice>>),
    /// A file.
    Writing(Box<PackedFileWriter>),
    /// A file that has all weights already.
    Written(Box<PackedFile>),
}

impl WeightImages {
    /// Prepares to store the layers of a plan. Host memory is allocated later; a file is opened, or begun if it is not there.
    /// `identity` makes the identity of the weights, which only a file needs.
    ///
    /// # Errors
    /// If a file can neither be read nor written, or host memory cannot be pinned.
    pub(crate) fn new(
        plan: &StreamPlan,
        identity: &dyn Fn() -> Result<Identity>,
        device: &dyn Device,
    ) -> Result<Self> {
        let mut places = HashMap::new();
        for (number, layer) in plan.layers.iter().enumerate() {
            let weights = layer.weights.iter().enumerate();
            places.extend(weights.map(|(place, weight)| (weight.name.clone(), (number, place))));
        }
        let (mut store, mut staging) = (Store::Host(vec![None; plan.layers.len()]), None);
        if let Some(disk) = &plan.disk {
            store = match PackedFile::open(&disk.folder, identity()?, &plan.layers)? {
                Opened::Complete(file) => Store::Written(Box::new(file)),
                Opened::Missing(writer) => Store::Writing(Box::new(writer)),
            };
            let weights = plan.layers.iter().flat_map(|layer| &layer.weights);
            let largest = weights.map(|weight| weight.bytes).max().unwrap_or(0).max(1);
            staging = Some(BufferSlice::whole(device.allocate(largest, MemoryKind::Pinned)?));
        }
        Ok(Self { places, store, staging, compared: HashSet::new() })
    }

    /// Whether a weight is streamed.
    pub(crate) fn has(&self, weight: &str) -> bool {
        self.places.contains_key(weight)
    }

    /// The packed bytes of a weight that need not be loaded, because an earlier run has written it. The first weight of each type is
    /// loaded all the same: [`Self::store`] then compares it with the file.
    pub(crate) fn written(&mut self, plan: &StreamPlan, weight: &str) -> Option<u64> {
        let (layer, place) = self.places.get(weight)?;
        let placed = &plan.layers[*layer].weights[*place];
        let written = matches!(self.store, Store::Written(_))
            && !self.compared.insert(format!("{:?}", placed.desc.weight_type));
        written.then_some(placed.bytes as u64)
    }

    /// Copies a packed weight to its place: enqueued for host memory, completed for a file.
    ///
    /// # Errors
    /// If host memory cannot be pinned, the file cannot be written, or the device failed.
    pub(crate) fn store(
        &mut self,
        plan: &StreamPlan,
        name: &str,
        packed: &Arc<dyn PackedWeight>,
        device: &dyn Device,
        stream: &mut dyn Stream,
    ) -> Result<()> {
        let missing = || Error::internal("is not streamed").at(name);
        let (layer, place) = self.places.get(name).copied().ok_or_else(missing)?;
        let PlacedWeight { offset, bytes, .. } = plan.layers[layer].weights[place];
        match &mut self.store {
            Store::Host(layers) => {
                let count = layers.len();
                let memory = match &layers[layer] {
                    Some(memory) => memory,
                    None => {
                        let bytes = plan.layers[layer].bytes;
                        let pinned = device.allocate(bytes.max(1), MemoryKind::Pinned);
                        let pinned = pinned.map_err(|error| cannot_pin(&error, layer, count, bytes))?;
                        layers[layer].insert(BufferSlice::whole(pinned))
                    }
                };
                device.kernels().copy_packed(stream, packed, &memory.slice(offset, bytes)?)?;
            }
            store => {
                let staging = self.staging.as_ref().ok_or_else(missing)?.slice(0, bytes)?;
                device.kernels().copy_packed(stream, packed, &staging)?;
                let mut data = vec![0; bytes];
                stream.download(&staging, &mut data, "a packed weight", TIMEOUT)?;
                match store {
                    Store::Writing(writer) => writer.write(layer, offset, &data)?,
                    Store::Written(file) if !file.has(layer, offset, &data) => {
                        let message = format!(
                            "the backend packs weights differently than when {} was written\nhint: delete the file, and it is \
                             written again at the next start",
                            file.path().display()
                        );
                        return Err(Error::new(Code::FailedPrecondition, message).at(name).into());
                    }
                    Store::Written(_) | Store::Host(_) => {}
                }
            }
        }
        Ok(())
    }

    /// The layers, now that all weights are stored: those that stay in host memory are read from the file, if there is one, and
    /// reading ahead of the others begins.
    ///
    /// # Errors
    /// If a weight was not stored, the file cannot be finished or read, or host memory cannot be pinned.
    pub(crate) fn finish(self, plan: &StreamPlan, device: &dyn Device) -> Result<LayerImages> {
        let missing = || Error::internal("a streamed layer was not loaded");
        let file = match self.store {
            Store::Host(layers) => {
                let images: Option<Vec<_>> = layers.into_iter().map(|memory| memory.map(Some)).collect();
                let images = images.ok_or_else(missing)?;
                return Ok(LayerImages { images, ahead: None });
            }
            Store::Writing(writer) => writer.finish()?,
            Store::Written(file) => *file,
        };
        let disk = plan.disk.as_ref().ok_or_else(missing)?;
        let mut images = Vec::with_capacity(plan.layers.len());
        for (number, layer) in plan.layers.iter().enumerate() {
            if disk.reads(number, plan.layers.len()) {
                images.push(None);
                continue;
            }
            let pinned = pinned_blocks(device, layer.bytes);
            let (memory, address) = pinned.map_err(|error| match error {
                crate::EngineError::Hal(error) => {
                    cannot_pin(&error, number, plan.layers.len(), layer.bytes).into()
                }
                error => error,
            })?;
            for piece in 0..file.pieces(number) {
                let range = file.range(number, piece);
                // SAFETY: the range lies inside the layer, for which there is room at the address, and nothing else uses the memory.
                let into =
                    unsafe { std::slice::from_raw_parts_mut(address.as_ptr().add(range.start), range.len()) };
                file.read_piece(number, piece, into)?;
            }
            images.push(Some(memory.slice(0, layer.bytes)?));
        }
        let layers: Vec<usize> = (0..images.len()).filter(|number| images[*number].is_none()).collect();
        let ahead = match layers.is_empty() {
            true => None,
            false => {
                let (file, bytes) = (Arc::new(file), plan.slot_bytes);
                Some(ReadAhead::start(file, layers, disk.read_ahead, bytes, device)?)
            }
        };
        Ok(LayerImages { images, ahead })
    }
}

/// The error for host memory that cannot be pinned. The driver reports it as out of memory, as if device memory were short.
fn cannot_pin(error: &Error, layer: usize, layers: usize, bytes: usize) -> Error {
    let message = format!(
        "{} of host memory for the weights of layer {} of {layers} cannot be pinned: {}\nhint: free host memory, raise the limit on \
         locked memory (ulimit -l), quantise the weights, keep more layers on the device with a larger --gpu-memory, or read layers \
         from disk with --weights-in disk:FOLDER",
        Bytes(bytes as u64),
        layer + 1,
        error.message()
    );
    Error::new(Code::OutOfMemory, message)
}

/// The packed weights of streamed layers, for copies to the device.
#[derive(Debug)]
pub(crate) struct LayerImages {
    /// The host memory of each layer that is kept in it.
    images: Vec<Option<BufferSlice>>,
    /// The other layers.
    ahead: Option<ReadAhead>,
}

/// What was read from disk.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct DiskReads {
    /// Bytes that were read so far.
    pub(crate) bytes: u64,
    /// Bytes per second of reads alone, measured when reading began.
    pub(crate) rate: Option<f64>,
}

impl LayerImages {
    /// The number of layers.
    pub(crate) fn count(&self) -> usize {
        self.images.len()
    }

    /// The host memory of a layer that is kept in it.
    pub(crate) fn in_host_memory(&self, layer: usize) -> Option<&BufferSlice> {
        self.images.get(layer)?.as_ref()
    }

    /// The memory that a layer is copied from; waits until it has been read.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) fn acquire(&mut self, layer: usize) -> Result<BufferSlice> {
        let missing = || Error::internal("a streamed layer is nowhere");
        match (&self.images[layer], &mut self.ahead) {
            (Some(memory), _) => Ok(memory.clone()),
            (None, Some(ahead)) => ahead.acquire(layer),
            (None, None) => Err(missing().into()),
        }
    }

    /// Says that the copies of the layer that was acquired are enqueued on a stream.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn release(&mut self, copies: &mut dyn Stream) -> Result<()> {
        self.ahead.as_mut().map_or(Ok(()), |ahead| ahead.release(copies))
    }

    /// What was read from disk, if layers are read from it.
    pub(crate) fn disk(&self) -> Option<DiskReads> {
        self.ahead.as_ref().map(|ahead| DiskReads { bytes: ahead.bytes(), rate: ahead.rate() })
    }
}
