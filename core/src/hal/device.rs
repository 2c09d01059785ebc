//! Backends, devices, memory and streams: what a plugin implements.
//!
//! # Contract
//!
//! - [`Backend`] and [`Device`] may be called from any thread, at the same time. Streams and graphs are used by one thread
//!   at a time, but may move between threads. No result depends on the calling thread.
//! - Work on a stream runs in order and may run later; enqueueing reports wrong arguments only. A device fault surfaces
//!   when a stream or event is waited for, and is permanent: after [`crate::Code::DeviceLost`] only dropping works.
//! - A child keeps its parents alive: a buffer outlives its device handle, a bound call its plan and buffers.
//! - Buffers are opaque; a backend rejects the objects of another backend with an error.
//! - Every wait has a timeout, and a name that its error repeats.

mod memory_account;

pub use memory_account::{MemoryAccount, MemoryReservation};

use crate::{DType, Error, Result, collective::Collective, graph::Graphs, kernels::Kernels, op::Profile};
use std::{any::Any, fmt::Debug, ptr::NonNull, sync::Arc, time::Duration};

/// The identity of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendInfo {
    /// The name users select it by: lower case, digits and `-`.
    pub name: String,
    /// Its version.
    pub version: String,
    /// A one-line description.
    pub description: String,
}

/// A family of devices.
pub trait Backend: Send + Sync + Debug {
    /// The name, version and description of the backend.
    fn info(&self) -> &BackendInfo;

    /// The devices that are present now; may be empty.
    ///
    /// # Errors
    /// [`crate::Code::Unavailable`] if a driver or library is missing; the message names it and where it was searched for.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;

    /// Opens a device, or a share of one.
    ///
    /// # Errors
    /// If there is no such device, or an option cannot be met.
    fn open(&self, index: usize, options: &DeviceOptions) -> Result<Arc<dyn Device>>;

    /// An offline device: one of this model that need not be present, for compiling its kernels ahead of time. It answers
    /// queries and plans as the real device would, but allocates no memory and runs nothing.
    ///
    /// # Errors
    /// [`crate::Code::Unsupported`] if the backend compiles nothing ahead of time, [`crate::Code::InvalidArgument`] with the known
    /// names if `name` is unknown or ambiguous, [`crate::Code::Unavailable`] if the compiler is missing.
    fn describe(&self, name: &str) -> Result<Arc<dyn Device>> {
        let message = format!("the backend cannot compile ahead of time for {name:?} or any other device");
        Err(Error::unsupported(message))
    }

    /// Reports the drivers, libraries and hardware features that the backend looks for on this machine, for people to read.
    fn diagnose(&self) -> Vec<Finding> {
        Vec::new()
    }
}

/// A thing that a backend looks for on a machine, and whether it is present.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked for: a driver, a library, a processor feature, a folder.
    pub subject: String,
    /// Whether it is present and usable.
    pub present: bool,
    /// The version and location found, or where it was searched for and what to do.
    pub detail: String,
}

/// A device that a backend can open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The index that [`Backend::open`] takes.
    pub index: usize,
    /// The product name, for people to read.
    pub name: String,
    /// The size of its memory in bytes, if known.
    pub memory_bytes: Option<u64>,
}

/// Options for opening a device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceOptions {
    /// The number of threads that a CPU device may use; all cores if absent.
    pub threads: Option<usize>,
    /// The limit in bytes on memory that this handle holds, so that several models can share a device.
    pub memory_limit: Option<u64>,
    /// The share of the compute units that this handle may use, above 0 and up to 1.
    pub compute_share: Option<f32>,
    /// Whether kernels are chosen so that a row's result does not depend on the other rows of a call, even where that is slower.
    /// A device without such kernels says so of the calls concerned ([`Support::batch_invariant`](crate::kernels::Support)).
    pub batch_invariant: bool,
}

/// The properties and capabilities of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProperties {
    /// The product name, for people to read.
    pub name: String,
    /// The size of its memory in bytes; 0 if unknown.
    pub memory_bytes: u64,
    /// The alignment in bytes that buffer offsets of arguments must have; a power of two.
    pub alignment: usize,
    /// The element types that its kernels support.
    pub dtypes: Vec<DType>,
    /// The profiles of which it supports every op.
    pub profiles: Vec<Profile>,
    /// Whether NaN in an input makes exactly the outputs that depend on it NaN. If not, those outputs are unspecified.
    pub strict_nan: bool,
    /// The float types whose subnormal numbers it may take for zero.
    pub flushed: Flushed,
    /// Whether the host can read device memory in place.
    pub unified_memory: bool,
    /// Whether calls take tensors in pinned memory wherever they take them in device memory, with the same results.
    pub binds_pinned: bool,
}

/// The float types whose subnormal numbers a device may replace by zeros of the same sign. Of other types it keeps them: in
/// operands, in results, and in copies, casts and sums of two. What an op computes on the way to a result, such as the products
/// of a sum or an exponential, may be flushed where it is below the smallest normal f32.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flushed {
    /// The types of operands.
    pub operands: Vec<DType>,
    /// The types of results.
    pub results: Vec<DType>,
}

impl Flushed {
    /// Whether the device may flush any number.
    pub fn is_any(&self) -> bool {
        !self.operands.is_empty() || !self.results.is_empty()
    }
}

/// The memory use of a device handle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes that live buffers and weights of this handle hold.
    pub used: u64,
    /// Bytes that can still be allocated, if the backend can tell.
    pub free: Option<u64>,
}

/// An open device.
pub trait Device: Send + Sync + Debug {
    /// The properties and capabilities of the device.
    fn properties(&self) -> &DeviceProperties;

    /// The memory that this handle uses.
    fn memory(&self) -> MemoryUse;

    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// [`crate::Code::OutOfMemory`] with the requested and the free bytes.
    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>>;

    /// Creates a stream.
    ///
    /// # Errors
    /// If the device cannot create another.
    fn stream(&self) -> Result<Box<dyn Stream>>;

    /// Creates an event.
    ///
    /// # Errors
    /// If the device cannot create another.
    fn event(&self) -> Result<Arc<dyn Event>>;

    /// The kernels of the device.
    fn kernels(&self) -> &dyn Kernels;

    /// Graph capture, if the device supports it.
    fn graphs(&self) -> Option<&dyn Graphs> {
        None
    }

    /// Collectives with other devices of the backend, if it supports them.
    fn collective(&self) -> Option<&dyn Collective> {
        None
    }
}

/// The kind of memory of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MemoryKind {
    /// Device memory.
    Device = 1,
    /// Pinned host memory that the device can access: results that the host polls, staging buffers for copies.
    Pinned = 2,
}

/// A piece of memory. It is freed when the last handle is dropped and all work that uses it is done.
pub trait Buffer: Any + Send + Sync + Debug {
    /// Its length in bytes.
    fn bytes(&self) -> usize;

    /// The kind of memory.
    fn kind(&self) -> MemoryKind;

    /// The address at which the host can access the buffer, if it can. It is valid as long as the buffer lives; accesses
    /// must not race with work on streams.
    fn host_pointer(&self) -> Option<NonNull<u8>> {
        None
    }
}

/// A range of a buffer.
#[derive(Clone, Debug)]
pub struct BufferSlice {
    /// The buffer.
    pub buffer: Arc<dyn Buffer>,
    /// The byte at which the range starts.
    pub offset: usize,
    /// The length of the range in bytes.
    pub bytes: usize,
}

impl BufferSlice {
    /// The range of `bytes` bytes at `offset` of a buffer.
    ///
    /// # Errors
    /// If the range exceeds the buffer.
    pub fn new(buffer: Arc<dyn Buffer>, offset: usize, bytes: usize) -> Result<Self> {
        match offset.checked_add(bytes) {
            Some(end) if end <= buffer.bytes() => Ok(Self { buffer, offset, bytes }),
            _ => {
                let message =
                    format!("{bytes} bytes at {offset} exceed a buffer of {} bytes", buffer.bytes());
                Err(Error::invalid(message).field("offset"))
            }
        }
    }

    /// The range of a whole buffer.
    pub fn whole(buffer: Arc<dyn Buffer>) -> Self {
        let bytes = buffer.bytes();
        Self { buffer, offset: 0, bytes }
    }

    /// The range of `bytes` bytes at `offset` of this range.
    ///
    /// # Errors
    /// If it exceeds this range.
    pub fn slice(&self, offset: usize, bytes: usize) -> Result<Self> {
        let start = self.offset.checked_add(offset);
        match offset.checked_add(bytes).zip(start) {
            Some((end, start)) if end <= self.bytes => Self::new(self.buffer.clone(), start, bytes),
            _ => Err(Error::invalid(format!(
                "{bytes} bytes at {offset} exceed a range of {} bytes",
                self.bytes
            ))
            .field("offset")),
        }
    }

    /// The buffer as the type of a backend, if it was allocated by the same device handle and contains the range.
    ///
    /// # Errors
    /// If the buffer belongs to another backend or handle, or the range exceeds it.
    pub fn own_buffer<T: Buffer>(&self, same_handle: impl FnOnce(&T) -> bool) -> Result<Arc<T>> {
        let any: Arc<dyn Any + Send + Sync> = self.buffer.clone();
        let buffer =
            any.downcast::<T>().map_err(|_| Error::invalid("belongs to another backend").field("buffer"))?;
        if !same_handle(&buffer) {
            return Err(Error::invalid("belongs to another handle of the device").field("buffer"));
        }
        // The fields are public, so the range need not lie in the buffer.
        Self::new(self.buffer.clone(), self.offset, self.bytes)?;
        Ok(buffer)
    }

    /// Whether the two ranges share a byte.
    pub fn overlaps(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer)
            && self.bytes.min(other.bytes) > 0
            && self.offset < other.offset.saturating_add(other.bytes)
            && other.offset < self.offset.saturating_add(self.bytes)
    }

    /// Whether both are the same range of the same buffer.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer) && (self.offset, self.bytes) == (other.offset, other.bytes)
    }
}

/// A queue of work that the device runs in order.
pub trait Stream: Any + Send + Debug {
    /// Copies bytes from the host. `source` may be reused as soon as this returns.
    ///
    /// # Errors
    /// If the lengths differ or the buffer belongs to another backend.
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()>;

    /// Waits for all work enqueued so far, then copies bytes to the host. `what` names the wait.
    ///
    /// # Errors
    /// If the lengths differ, the buffer belongs to another backend, the device failed, or the wait timed out.
    fn download(
        &mut self,
        source: &BufferSlice,
        destination: &mut [u8],
        what: &str,
        timeout: Duration,
    ) -> Result<()>;

    /// Enqueues a copy between two ranges that do not overlap. Either may be in pinned host memory.
    ///
    /// # Errors
    /// If the lengths differ, the ranges overlap, or a buffer belongs to another backend.
    fn copy(&mut self, source: &BufferSlice, destination: &BufferSlice) -> Result<()>;

    /// Enqueues setting every byte of a range.
    ///
    /// # Errors
    /// If the buffer belongs to another backend.
    fn fill(&mut self, destination: &BufferSlice, byte: u8) -> Result<()>;

    /// Records an event, which completes when all work enqueued so far has completed.
    ///
    /// # Errors
    /// If the event belongs to another backend.
    fn record(&mut self, event: &dyn Event) -> Result<()>;

    /// Makes later work on this stream wait for an event recorded on any stream of the backend.
    ///
    /// # Errors
    /// If the event belongs to another backend.
    fn wait(&mut self, event: &dyn Event) -> Result<()>;

    /// Waits for all work enqueued so far. `what` names the wait.
    ///
    /// # Errors
    /// If the device failed or the wait timed out.
    fn synchronize(&mut self, what: &str, timeout: Duration) -> Result<()>;
}

impl dyn Stream {
    /// The stream as the type of a backend, if it was made by the same device handle.
    ///
    /// # Errors
    /// If it belongs to another backend or handle.
    pub fn own<T: Stream>(&mut self, same_handle: impl FnOnce(&T) -> bool) -> Result<&mut T> {
        match (self as &mut dyn Any).downcast_mut::<T>() {
            Some(own) if same_handle(own) => Ok(own),
            Some(_) => Err(Error::invalid("belongs to another handle of the device").at("stream")),
            None => Err(Error::invalid("belongs to another backend").at("stream")),
        }
    }
}

/// A point in a stream that can be waited for.
pub trait Event: Any + Send + Sync + Debug {
    /// Whether the last recorded point is reached; true if the event was never recorded.
    ///
    /// # Errors
    /// If the device failed.
    fn reached(&self) -> Result<bool>;

    /// Waits until the last recorded point is reached. `what` names the wait.
    ///
    /// # Errors
    /// If the device failed or the wait timed out.
    fn synchronize(&self, what: &str, timeout: Duration) -> Result<()>;

    /// The time from an earlier recorded event to this one, if the device measures time.
    ///
    /// # Errors
    /// If either was never recorded, or `earlier` belongs to another backend.
    fn elapsed_since(&self, earlier: &dyn Event) -> Result<Option<Duration>>;
}
