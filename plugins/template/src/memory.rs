//! Memory, streams and events. Work completes when it is enqueued, so waiting returns at once.

use crate::out_of_memory;
use dsrun_core::{
    Error, Result,
    device::{Buffer, BufferSlice, Event, MemoryKind, MemoryUse, Stream},
};
use std::{
    any::Any,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

/// The memory that a device handle holds, and its limit.
#[derive(Debug)]
pub(crate) struct Account {
    used: AtomicU64,
    limit: Option<u64>,
}

impl Account {
    pub(crate) fn new(limit: Option<u64>) -> Self {
        Self { used: AtomicU64::new(0), limit }
    }

    pub(crate) fn memory(&self) -> MemoryUse {
        let used = self.used.load(Ordering::Relaxed);
        MemoryUse { used, free: self.limit.map(|limit| limit.saturating_sub(used)) }
    }

    fn take(&self, bytes: usize) -> Result<()> {
        let limit = self.limit.unwrap_or(u64::MAX);
        let add = |used: u64| used.checked_add(bytes as u64).filter(|used| *used <= limit);
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        taken.map(drop).map_err(|used| out_of_memory(bytes, limit.saturating_sub(used)))
    }
}

/// A piece of memory.
#[derive(Debug)]
pub(crate) struct HostBuffer {
    bytes: Mutex<Vec<u8>>,
    length: usize,
    kind: MemoryKind,
    account: Arc<Account>,
}

impl HostBuffer {
    pub(crate) fn new(account: &Arc<Account>, length: usize, kind: MemoryKind) -> Result<Self> {
        account.take(length)?;
        // Dropping it releases the reservation, also if the allocation fails.
        let buffer = Self { bytes: Mutex::default(), length, kind, account: account.clone() };
        {
            let mut bytes = buffer.lock();
            bytes.try_reserve_exact(length).map_err(|_| out_of_memory(length, 0))?;
            bytes.resize(length, 0);
        }
        Ok(buffer)
    }

    /// The buffer of a slice. The host has checked that the slice lies inside.
    pub(crate) fn of(slice: &BufferSlice) -> Result<Arc<Self>> {
        let any: Arc<dyn Any + Send + Sync> = slice.buffer.clone();
        any.downcast().map_err(|_| Error::invalid("belongs to another backend").field("buffer"))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        self.account.used.fetch_sub(self.length as u64, Ordering::Relaxed);
    }
}

impl Buffer for HostBuffer {
    fn bytes(&self) -> usize {
        self.length
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }
}

/// Runs `work` on the bytes of a slice.
fn with_range<T>(slice: &BufferSlice, name: &str, work: impl FnOnce(&mut [u8]) -> T) -> Result<T> {
    let buffer = HostBuffer::of(slice).map_err(|error| error.at(name))?;
    let mut bytes = buffer.lock();
    let range = slice.offset..slice.offset.saturating_add(slice.bytes);
    let exceeds = || Error::invalid("exceeds its buffer").at(name).field("offset");
    let range = bytes.get_mut(range).ok_or_else(exceeds)?;
    Ok(work(range))
}

fn equal_lengths(source: usize, destination: usize) -> Result<()> {
    if source == destination {
        return Ok(());
    }
    let message = format!("is {destination} bytes, but the source is {source}");
    Err(Error::invalid(message).at("destination").field("bytes"))
}

/// A queue of work.
#[derive(Debug)]
pub(crate) struct HostStream;

impl HostStream {
    /// Checks that a stream belongs to this backend.
    pub(crate) fn check(stream: &dyn Stream) -> Result<()> {
        let any: &dyn Any = stream;
        any.downcast_ref::<Self>()
            .map(|_| ())
            .ok_or_else(|| Error::invalid("belongs to another backend").at("stream"))
    }
}

impl Stream for HostStream {
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()> {
        equal_lengths(source.len(), destination.bytes)?;
        with_range(destination, "destination", |bytes| bytes.copy_from_slice(source))
    }

    fn download(&mut self, source: &BufferSlice, destination: &mut [u8], _: &str, _: Duration) -> Result<()> {
        equal_lengths(source.bytes, destination.len())?;
        with_range(source, "source", |bytes| destination.copy_from_slice(bytes))
    }

    fn copy(&mut self, source: &BufferSlice, destination: &BufferSlice) -> Result<()> {
        equal_lengths(source.bytes, destination.bytes)?;
        if source.overlaps(destination) {
            return Err(Error::invalid("overlaps the source").at("destination"));
        }
        let bytes = with_range(source, "source", |bytes| bytes.to_vec())?;
        self.upload(&bytes, destination)
    }

    fn fill(&mut self, destination: &BufferSlice, byte: u8) -> Result<()> {
        with_range(destination, "destination", |bytes| bytes.fill(byte))
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        HostEvent::own(event)?.recorded.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        HostEvent::own(event).map(drop)
    }

    fn synchronize(&mut self, _: &str, _: Duration) -> Result<()> {
        Ok(())
    }
}

/// A point in a stream.
#[derive(Debug, Default)]
pub(crate) struct HostEvent {
    recorded: AtomicBool,
}

impl HostEvent {
    fn own(event: &dyn Event) -> Result<&Self> {
        let any: &dyn Any = event;
        any.downcast_ref().ok_or_else(|| Error::invalid("belongs to another backend").at("event"))
    }
}

impl Event for HostEvent {
    fn reached(&self) -> Result<bool> {
        Ok(true)
    }

    fn synchronize(&self, _: &str, _: Duration) -> Result<()> {
        Ok(())
    }

    fn elapsed_since(&self, earlier: &dyn Event) -> Result<Option<Duration>> {
        let both = [self, Self::own(earlier)?].iter().all(|event| event.recorded.load(Ordering::Relaxed));
        // This device does not measure time.
        if both { Ok(None) } else { Err(Error::invalid("was never recorded").at("event")) }
    }
}
