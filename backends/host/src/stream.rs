//! Streams and events. Work is done when it is enqueued, so there is never anything to wait for.

use crate::{host::Host, memory::locate};
use dsrun_core::{
    Error, Result,
    device::{BufferSlice, Event, Stream},
};
use std::{
    any::Any,
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// A stream, which runs work on its device at once.
#[derive(Debug)]
pub(crate) struct HostStream {
    host: Arc<Host>,
}

impl HostStream {
    pub(crate) fn new(host: Arc<Host>) -> Self {
        Self { host }
    }

    /// Refuses a stream that does not belong to the device handle `host`.
    pub(crate) fn check(stream: &dyn Stream, host: &Arc<Host>) -> Result<()> {
        match (stream as &dyn Any).downcast_ref::<Self>() {
            Some(own) if Arc::ptr_eq(&own.host, host) => Ok(()),
            Some(_) => Err(Error::invalid("belongs to another handle of the device").at("stream")),
            None => Err(Error::invalid("belongs to another backend").at("stream")),
        }
    }

    fn range(&self, slice: &BufferSlice, name: &str) -> Result<NonNull<u8>> {
        locate(slice, &self.host).map(|(_, pointer)| pointer).map_err(|error| error.at(name))
    }
}

fn equal_lengths(source: usize, destination: usize) -> Result<()> {
    if source == destination {
        return Ok(());
    }
    let message = format!("is {destination} bytes, but the source is {source}");
    Err(Error::invalid(message).at("destination").field("bytes"))
}

impl Stream for HostStream {
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()> {
        equal_lengths(source.len(), destination.bytes)?;
        let pointer = self.range(destination, "destination")?;
        let _turn = self.host.lock();
        // SAFETY: the destination is `source.len()` bytes inside a live buffer of this device, and it is our turn. `source`
        // may be memory of the same buffer that the caller reaches by its host pointer, which `copy` allows.
        unsafe { std::ptr::copy(source.as_ptr(), pointer.as_ptr(), source.len()) };
        Ok(())
    }

    fn download(&mut self, source: &BufferSlice, destination: &mut [u8], _: &str, _: Duration) -> Result<()> {
        equal_lengths(source.bytes, destination.len())?;
        let pointer = self.range(source, "source")?;
        let _turn = self.host.lock();
        // SAFETY: as in `upload`, the other way round.
        unsafe { std::ptr::copy(pointer.as_ptr(), destination.as_mut_ptr(), destination.len()) };
        Ok(())
    }

    fn copy(&mut self, source: &BufferSlice, destination: &BufferSlice) -> Result<()> {
        equal_lengths(source.bytes, destination.bytes)?;
        let from = self.range(source, "source")?;
        let to = self.range(destination, "destination")?;
        if source.overlaps(destination) {
            return Err(Error::invalid("overlaps the source").at("destination"));
        }
        let _turn = self.host.lock();
        // SAFETY: both ranges are `source.bytes` long inside live buffers of this device, and it is our turn.
        unsafe { std::ptr::copy(from.as_ptr(), to.as_ptr(), source.bytes) };
        Ok(())
    }

    fn fill(&mut self, destination: &BufferSlice, byte: u8) -> Result<()> {
        let pointer = self.range(destination, "destination")?;
        let _turn = self.host.lock();
        // SAFETY: the range lies inside a live buffer of this device, and it is our turn.
        unsafe { std::ptr::write_bytes(pointer.as_ptr(), byte, destination.bytes) };
        Ok(())
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        HostEvent::own(event)?.record();
        Ok(())
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        HostEvent::own(event).map(drop)
    }

    fn synchronize(&mut self, _: &str, _: Duration) -> Result<()> {
        Ok(())
    }
}

/// An event, with the time at which it was last recorded.
#[derive(Debug, Default)]
pub(crate) struct HostEvent {
    recorded: Mutex<Option<Instant>>,
}

impl HostEvent {
    fn own(event: &dyn Event) -> Result<&Self> {
        let own = (event as &dyn Any).downcast_ref::<Self>();
        own.ok_or_else(|| Error::invalid("belongs to another backend").at("event"))
    }

    fn record(&self) {
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn time(&self) -> Result<Instant> {
        let recorded = *self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        recorded.ok_or_else(|| Error::invalid("was never recorded").at("event"))
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
        let earlier = Self::own(earlier)?.time()?;
        Ok(Some(self.time()?.saturating_duration_since(earlier)))
    }
}
