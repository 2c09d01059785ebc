//! Backends, devices, memory and streams: what a plugin implements.
//!
//! # Contract
//!
//! - [`Backend`] and [`Device`] may be called from any thread, at the same time. Streams and graphs are used by one thread
//!   at a time, but may move between threads. Nothing depends on which thread calls.
//! - Work on a stream runs in order and may run later; enqueueing reports wrong arguments only. A fault of the device
//!   shows when the stream or an event is waited for, and stays: after [`crate::Code::DeviceLost`] only dropping works.
//! - A child keeps its parents alive: a buffer outlives its device handle, a bound call its plan and buffers.
//! - Buffers are opaque; a backend refuses the objects of another backend with an error.
//! - Every wait has a timeout and a name, which the error repeats.

use crate::{DType, Error, Result, collective::Collective, graph::Graphs, kernels::Kernels, op::Profile};
use std::{any::Any, fmt::Debug, ptr::NonNull, sync::Arc, time::Duration};

/// Who a backend is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendInfo {
    /// The name users select it by: lower case, digits and `-`.
    pub name: String,
    /// Its version.
    pub version: String,
    /// What it is, in a line.
    pub description: String,
}

/// A family of devices.
pub trait Backend: Send + Sync + Debug {
    /// Who this is.
    fn info(&self) -> &BackendInfo;

    /// The devices that are there now. Empty if there are none.
    ///
    /// # Errors
    /// [`crate::Code::Unavailable`] if a driver or library is missing: the message says which and where it was looked for.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;

    /// Opens a device, or a share of one.
    ///
    /// # Errors
    /// If there is no such device, or an option cannot be met.
    fn open(&self, index: usize, options: &DeviceOptions) -> Result<Arc<dyn Device>>;

    /// A device that is not here, by a name that the backend knows it by: to have built ahead, on a machine without it, what the
    /// device will need. It answers queries and plans as the device would; it has no memory to allocate, and runs nothing.
    ///
    /// # Errors
    /// [`crate::Code::Unsupported`] if the backend builds nothing ahead, [`crate::Code::InvalidArgument`] if it does not know the
    /// name or that says too little; the message says which it knows. [`crate::Code::Unavailable`] if what builds is missing.
    fn describe(&self, name: &str) -> Result<Arc<dyn Device>> {
        let message = format!("the backend builds nothing ahead for a device that is not here, as {name:?}");
        Err(Error::unsupported(message))
    }

    /// What the backend uses on this machine, and what it found of it: for people, who want to know why it works or does not.
    fn diagnose(&self) -> Vec<Finding> {
        Vec::new()
    }
}

/// Something a backend uses on a machine, and whether it is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What: a driver, a library, a feature of the processor, a folder.
    pub subject: String,
    /// Whether it is there and fit for use.
    pub present: bool,
    /// Which version, and where; or where it was looked for and what to do.
    pub detail: String,
}

/// A device, before it is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// What [`Backend::open`] takes.
    pub index: usize,
    /// Its name for people.
    pub name: String,
    /// Memory in bytes, if known.
    pub memory_bytes: Option<u64>,
}

/// How a device is opened.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceOptions {
    /// Threads a CPU device may use; all cores if absent.
    pub threads: Option<usize>,
    /// The most memory this handle may hold, so that several models can share a card.
    pub memory_limit: Option<u64>,
    /// The share of the device's compute units this handle may use, above 0 and up to 1.
    pub compute_share: Option<f32>,
}

/// What a device is and can do.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProperties {
    /// Its name for people.
    pub name: String,
    /// Memory in bytes; 0 if unknown.
    pub memory_bytes: u64,
    /// Buffer offsets that operands are bound at are multiples of this (a power of two).
    pub alignment: usize,
    /// Element types its kernels take.
    pub dtypes: Vec<DType>,
    /// Sets of ops it has all of.
    pub profiles: Vec<Profile>,
    /// Whether NaN in an input shows in exactly the outputs that depend on it. If not, NaN may give anything in them.
    pub strict_nan: bool,
    /// Whether memory of the device can be read by the host in place.
    pub unified_memory: bool,
}

/// Memory in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes held by live buffers and weights of this handle.
    pub used: u64,
    /// Bytes that can still be had, as far as the backend can tell.
    pub free: Option<u64>,
}

/// An open device.
pub trait Device: Send + Sync + Debug {
    /// What it is and can do.
    fn properties(&self) -> &DeviceProperties;

    /// Memory in use.
    fn memory(&self) -> MemoryUse;

    /// Allocates memory. Its contents are zero.
    ///
    /// # Errors
    /// [`crate::Code::OutOfMemory`] with what was asked for and what is free.
    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>>;

    /// Creates a queue for work.
    ///
    /// # Errors
    /// If the device has no more.
    fn stream(&self) -> Result<Box<dyn Stream>>;

    /// Creates an event.
    ///
    /// # Errors
    /// If the device has no more.
    fn event(&self) -> Result<Arc<dyn Event>>;

    /// What it computes.
    fn kernels(&self) -> &dyn Kernels;

    /// Capturing and replaying work, if the device can.
    fn graphs(&self) -> Option<&dyn Graphs> {
        None
    }

    /// Collectives with other devices of the backend, if it has them.
    fn collective(&self) -> Option<&dyn Collective> {
        None
    }
}

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MemoryKind {
    /// On the device.
    Device = 1,
    /// On the host, reachable by the device: results the host polls, staging for copies.
    Pinned = 2,
}

/// A piece of memory, freed when the last handle is dropped and all work that uses it is done.
pub trait Buffer: Any + Send + Sync + Debug {
    /// How long it is.
    fn bytes(&self) -> usize;

    /// Where it is.
    fn kind(&self) -> MemoryKind;

    /// The address by which the host may access it, if it may. It is valid as long as the buffer; accesses must not race
    /// with work on streams.
    fn host_pointer(&self) -> Option<NonNull<u8>> {
        None
    }
}

/// A range of a buffer.
#[derive(Clone, Debug)]
pub struct BufferSlice {
    /// The buffer.
    pub buffer: Arc<dyn Buffer>,
    /// Where the range starts.
    pub offset: usize,
    /// How long it is.
    pub bytes: usize,
}

impl BufferSlice {
    /// A range of a buffer.
    ///
    /// # Errors
    /// If it is not inside.
    pub fn new(buffer: Arc<dyn Buffer>, offset: usize, bytes: usize) -> Result<Self> {
        match offset.checked_add(bytes) {
            Some(end) if end <= buffer.bytes() => Ok(Self { buffer, offset, bytes }),
            _ => {
                let message =
                    format!("{bytes} bytes at {offset} are not inside a buffer of {} bytes", buffer.bytes());
                Err(Error::invalid(message).field("offset"))
            }
        }
    }

    /// All of a buffer.
    pub fn whole(buffer: Arc<dyn Buffer>) -> Self {
        let bytes = buffer.bytes();
        Self { buffer, offset: 0, bytes }
    }

    /// A range of this range.
    ///
    /// # Errors
    /// If it is not inside.
    pub fn slice(&self, offset: usize, bytes: usize) -> Result<Self> {
        let start = self.offset.checked_add(offset);
        match offset.checked_add(bytes).zip(start) {
            Some((end, start)) if end <= self.bytes => Self::new(self.buffer.clone(), start, bytes),
            _ => Err(Error::invalid(format!("{bytes} bytes at {offset} are not inside {}", self.bytes))
                .field("offset")),
        }
    }

    /// Whether both are in one buffer and share a byte.
    pub fn overlaps(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer)
            && self.bytes.min(other.bytes) > 0
            && self.offset < other.offset.saturating_add(other.bytes)
            && other.offset < self.offset.saturating_add(self.bytes)
    }

    /// Whether both are the same range of one buffer.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer) && (self.offset, self.bytes) == (other.offset, other.bytes)
    }
}

/// A queue of work that runs in order.
pub trait Stream: Any + Send + Debug {
    /// Copies bytes from the host. `source` may be reused as soon as this returns.
    ///
    /// # Errors
    /// If the lengths differ or the buffer is another backend's.
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()>;

    /// Waits for all work enqueued so far, then copies bytes to the host. `what` names the wait.
    ///
    /// # Errors
    /// If the lengths differ, the buffer is another backend's, the device failed, or the wait ran out of time.
    fn download(
        &mut self,
        source: &BufferSlice,
        destination: &mut [u8],
        what: &str,
        timeout: Duration,
    ) -> Result<()>;

    /// Copies bytes on the device, in order with its other work. The ranges do not overlap; either may be in pinned memory.
    ///
    /// # Errors
    /// If the lengths differ, the ranges overlap, or a buffer is another backend's.
    fn copy(&mut self, source: &BufferSlice, destination: &BufferSlice) -> Result<()>;

    /// Sets every byte.
    ///
    /// # Errors
    /// If the buffer is another backend's.
    fn fill(&mut self, destination: &BufferSlice, byte: u8) -> Result<()>;

    /// Marks the point reached when everything enqueued so far is done.
    ///
    /// # Errors
    /// If the event is another backend's.
    fn record(&mut self, event: &dyn Event) -> Result<()>;

    /// Lets later work on this stream wait for an event recorded on any stream of the backend.
    ///
    /// # Errors
    /// If the event is another backend's.
    fn wait(&mut self, event: &dyn Event) -> Result<()>;

    /// Waits until everything enqueued so far is done. `what` names the wait.
    ///
    /// # Errors
    /// If the device failed or the wait ran out of time.
    fn synchronize(&mut self, what: &str, timeout: Duration) -> Result<()>;
}

/// A point in a stream.
pub trait Event: Any + Send + Sync + Debug {
    /// Whether the point last recorded is reached; true if none ever was.
    ///
    /// # Errors
    /// If the device failed.
    fn reached(&self) -> Result<bool>;

    /// Waits until it is reached. `what` names the wait.
    ///
    /// # Errors
    /// If the device failed or the wait ran out of time.
    fn synchronize(&self, what: &str, timeout: Duration) -> Result<()>;

    /// Time from an earlier recorded event to this one, if the device keeps time.
    ///
    /// # Errors
    /// If either was never recorded, or the other is another backend's.
    fn elapsed_since(&self, earlier: &dyn Event) -> Result<Option<Duration>>;
}
