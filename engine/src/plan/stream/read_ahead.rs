//! Reads layers from disk into host memory ahead of their copies to the device.
//!
//! Threads read the layers of a file in the order of a step, over and over, into a few buffers of pinned memory. A buffer is read
//! into again when the copy of its layer to the device has completed. Reads therefore continue across steps, as copies do.

use super::packed_file::{BLOCK, PackedFile};
use crate::error::Result;
use dsrun_core::{
    Code, Error,
    device::{BufferSlice, Device, Event, MemoryKind, Stream},
};
use std::{
    collections::VecDeque,
    ptr::NonNull,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Threads that read. Solid-state disks need several reads in flight to reach their rate.
const READERS: usize = 4;
/// How long the copy of a layer, or the reading of one, may take.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The layers in host memory that are copied next, and the threads that read them.
#[derive(Debug)]
pub(crate) struct ReadAhead {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
    /// The buffer of the layer that is being copied.
    taken: Option<usize>,
}

#[derive(Debug)]
struct Shared {
    file: Arc<PackedFile>,
    /// The numbers of the layers that are read, in the order of a step.
    layers: Vec<usize>,
    buffers: Vec<ReadBuffer>,
    state: Mutex<State>,
    changed: Condvar,
    started: Instant,
}

/// Pinned memory for a layer.
#[derive(Debug)]
struct ReadBuffer {
    memory: BufferSlice,
    address: HostAddress,
    /// Recorded behind the copy to the device.
    copied: Arc<dyn Event>,
}

/// Where the host finds pinned memory.
#[derive(Clone, Copy, Debug)]
struct HostAddress(NonNull<u8>);

// SAFETY: the address is that of memory which its `ReadBuffer` keeps alive, and which may be used from every thread.
unsafe impl Send for HostAddress {}
// SAFETY: as above; who may write when is said at `Shared::read`.
unsafe impl Sync for HostAddress {}

#[derive(Debug, Default)]
struct State {
    /// Layers that are read or are being read, in order.
    entries: VecDeque<Entry>,
    /// The number of the first entry among all that there were.
    first: u64,
    /// Buffers without an entry.
    spare: VecDeque<usize>,
    /// The place in `layers` of the layer that is read next.
    next: usize,
    stopped: bool,
    failed: Option<Error>,
    /// Bytes that were read.
    bytes: u64,
    /// Layers that were read completely.
    layers_read: usize,
    /// Bytes per second of the first reads, when no buffer had to be waited for.
    rate: Option<f64>,
}

/// A layer in a buffer.
#[derive(Debug)]
struct Entry {
    layer: usize,
    buffer: usize,
    /// Whether the copy of the layer that was in the buffer before is known to have completed.
    writable: bool,
    /// Whether a thread waits for that copy.
    awaited: bool,
    /// The piece that is read next.
    next: usize,
    done: usize,
    pieces: usize,
}

/// What a thread does next for an entry.
enum Task {
    AwaitCopy { entry: u64, buffer: usize },
    Read { entry: u64, layer: usize, buffer: usize, piece: usize },
}

impl ReadAhead {
    /// Allocates so many buffers of `bytes` bytes, and begins to read these layers of a file.
    ///
    /// # Errors
    /// If host memory cannot be pinned, or the host cannot access it.
    pub(crate) fn start(
        file: Arc<PackedFile>,
        layers: Vec<usize>,
        count: usize,
        bytes: usize,
        device: &dyn Device,
    ) -> Result<Self> {
        let mut buffers = Vec::with_capacity(count);
        for _ in 0..count {
            let (memory, address) = pinned_blocks(device, bytes)?;
            buffers.push(ReadBuffer { memory, address: HostAddress(address), copied: device.event()? });
        }
        let state = Mutex::new(State { spare: (0..count).collect(), ..State::default() });
        let (changed, started) = (Condvar::new(), Instant::now());
        let shared = Arc::new(Shared { file, layers, buffers, state, changed, started });
        let reader = |number: usize| {
            let shared = shared.clone();
            thread::Builder::new().name(format!("read-ahead-{number}")).spawn(move || shared.run_reader())
        };
        let readers: std::io::Result<Vec<_>> = (0..READERS).map(reader).collect();
        let ahead = |readers| Self { shared: shared.clone(), readers, taken: None };
        readers.map(ahead).map_err(|error| {
            shared.locked().stopped = true;
            shared.changed.notify_all();
            Error::internal(format!("a thread that reads weights cannot be started: {error}")).into()
        })
    }

    /// Waits until a layer has been read. Its memory stays as it is until [`Self::release`]. Layers in front of it are skipped.
    ///
    /// # Errors
    /// If the file cannot be read, has changed, or the wait takes too long.
    pub(crate) fn acquire(&mut self, layer: usize) -> Result<BufferSlice> {
        let shared = &*self.shared;
        let start = Instant::now();
        let mut state = shared.locked();
        loop {
            if let Some(error) = &state.failed {
                return Err(error.clone().into());
            }
            match state.entries.front() {
                Some(front) if front.is_read() => {
                    let (found, buffer) = (front.layer, front.buffer);
                    state.entries.pop_front();
                    state.first += 1;
                    if found == layer {
                        self.taken = Some(buffer);
                        return Ok(shared.buffers[buffer].memory.clone());
                    }
                    state.spare.push_back(buffer);
                    shared.changed.notify_all();
                    continue;
                }
                _ => {}
            }
            let Some(left) = TIMEOUT.checked_sub(start.elapsed()) else {
                let message = format!(
                    "waited {TIMEOUT:?} for streamed layer {} to be read from {}",
                    layer + 1,
                    shared.file.path().display()
                );
                return Err(Error::new(Code::Timeout, message).into());
            };
            state =
                shared.changed.wait_timeout(state, left).map_or_else(|error| error.into_inner().0, |it| it.0);
        }
    }

    /// Records behind the copies of the layer that was acquired that its memory may be read into again.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn release(&mut self, copies: &mut dyn Stream) -> Result<()> {
        let Some(buffer) = self.taken.take() else { return Ok(()) };
        copies.record(&*self.shared.buffers[buffer].copied)?;
        self.shared.locked().spare.push_back(buffer);
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Bytes that were read so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.shared.locked().bytes
    }

    /// The bytes per second of reads alone, measured when all buffers were filled for the first time.
    pub(crate) fn rate(&self) -> Option<f64> {
        self.shared.locked().rate
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.shared.locked().stopped = true;
        self.shared.changed.notify_all();
        for reader in self.readers.drain(..) {
            if reader.join().is_err() {
                tracing::error!("a thread that reads weights panicked");
            }
        }
    }
}

impl Entry {
    fn is_read(&self) -> bool {
        self.done == self.pieces
    }
}

impl State {
    /// What is to be done next, if anything is: the earliest entry first.
    fn next_task(&mut self, shared: &Shared) -> Option<Task> {
        while let Some(buffer) = self.spare.pop_front() {
            let layer = shared.layers[self.next];
            self.next = (self.next + 1) % shared.layers.len();
            let pieces = shared.file.pieces(layer);
            let entry = Entry { layer, buffer, writable: false, awaited: false, next: 0, done: 0, pieces };
            self.entries.push_back(entry);
        }
        let first = self.first;
        self.entries.iter_mut().zip(first..).find_map(|(entry, number)| {
            let Entry { layer, buffer, .. } = *entry;
            if !entry.writable {
                return (!std::mem::replace(&mut entry.awaited, true))
                    .then_some(Task::AwaitCopy { entry: number, buffer });
            }
            let piece = entry.next;
            (piece < entry.pieces).then(|| {
                entry.next += 1;
                Task::Read { entry: number, layer, buffer, piece }
            })
        })
    }

    /// An entry that a thread works for; it stays until all of it is read.
    fn entry(&mut self, number: u64) -> Option<&mut Entry> {
        let place = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.entries.get_mut(place)
    }
}

impl Shared {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_reader(&self) {
        loop {
            let mut state = self.locked();
            let task = loop {
                if state.stopped || state.failed.is_some() {
                    return;
                }
                if let Some(task) = state.next_task(self) {
                    break task;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            let result = self.work(&task);
            let mut state = self.locked();
            match (result, task) {
                (Err(error), _) => state.failed = Some(error),
                (Ok(_), Task::AwaitCopy { entry, .. }) => {
                    if let Some(entry) = state.entry(entry) {
                        entry.writable = true;
                    }
                }
                (Ok(bytes), Task::Read { entry, .. }) => {
                    state.bytes += bytes as u64;
                    let read = state.entry(entry).is_some_and(|entry| {
                        entry.done += 1;
                        entry.is_read()
                    });
                    state.layers_read += usize::from(read);
                    if state.rate.is_none() && state.layers_read >= self.buffers.len() {
                        state.rate =
                            Some(state.bytes as f64 / self.started.elapsed().as_secs_f64().max(1e-9));
                    }
                }
            }
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Does a task; returns the bytes that were read.
    fn work(&self, task: &Task) -> std::result::Result<usize, Error> {
        match *task {
            Task::AwaitCopy { buffer, .. } => {
                let copied = &self.buffers[buffer].copied;
                copied.synchronize("the copy of a streamed layer", TIMEOUT).map(|()| 0)
            }
            Task::Read { layer, buffer, piece, .. } => {
                let range = self.file.range(layer, piece);
                let bytes = range.len();
                // SAFETY: the range lies inside a layer, and a buffer has room for every layer. The copy of what was in the buffer
                // before has completed, the next one is not enqueued before all pieces are read, and no other thread has this piece.
                let into = unsafe {
                    let start = self.buffers[buffer].address.0.as_ptr().add(range.start);
                    std::slice::from_raw_parts_mut(start, bytes)
                };
                self.file.read_piece(layer, piece, into)?;
                Ok(bytes)
            }
        }
    }
}

/// Pinned memory of `bytes` bytes that begins at a block, and where the host finds it.
///
/// # Errors
/// If host memory cannot be pinned, or the host cannot access it.
pub(crate) fn pinned_blocks(device: &dyn Device, bytes: usize) -> Result<(BufferSlice, NonNull<u8>)> {
    let bytes = bytes.next_multiple_of(BLOCK);
    let memory = BufferSlice::whole(device.allocate(bytes + BLOCK, MemoryKind::Pinned)?);
    let address = memory.buffer.host_pointer();
    let address = address.ok_or_else(|| {
        Error::unsupported(
            "weights cannot be read from disk: the host cannot access the device's pinned memory",
        )
    })?;
    let skipped = address.as_ptr().align_offset(BLOCK);
    let memory = memory.slice(skipped, bytes)?;
    // SAFETY: the slice, which was checked, lies inside the buffer.
    Ok((memory, unsafe { address.add(skipped) }))
}
