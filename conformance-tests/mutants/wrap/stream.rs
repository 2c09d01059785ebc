//! Streams and events of the CPU backend, with a fault.

use crate::faults::Fault;
use dsrun_core::{
    Result,
    device::{BufferSlice, Event, MemoryKind, Stream},
};
use std::{any::Any, sync::Arc, time::Duration};

/// A stream of the CPU backend, and which one of the device it is.
#[derive(Debug)]
pub(crate) struct MutantStream {
    pub(crate) inner: Box<dyn Stream>,
    pub(crate) fault: &'static Fault,
    pub(crate) number: u64,
    /// Where the last copy to the host went.
    pub(crate) on_host: Option<BufferSlice>,
}

/// The stream as the CPU backend knows it, and its number.
pub(crate) fn inner_stream(stream: &mut dyn Stream) -> (&mut dyn Stream, u64) {
    if (&*stream as &dyn Any).is::<MutantStream>() {
        let any: &mut dyn Any = stream;
        if let Some(MutantStream { inner, number, .. }) = any.downcast_mut() {
            return (&mut **inner, *number);
        }
        unreachable!("it was just seen to be one");
    }
    (stream, 0)
}

impl Stream for MutantStream {
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()> {
        self.inner.upload(source, destination)
    }

    fn download(
        &mut self,
        source: &BufferSlice,
        destination: &mut [u8],
        what: &str,
        timeout: Duration,
    ) -> Result<()> {
        self.inner.download(source, destination, what, timeout)
    }

    fn copy(&mut self, source: &BufferSlice, destination: &BufferSlice) -> Result<()> {
        if self.fault.copies_overlap && source.overlaps(destination) {
            let mut bytes = vec![0; source.bytes];
            self.inner.download(source, &mut bytes, "a copy onto itself", Duration::from_secs(30))?;
            return self.inner.upload(&bytes, destination);
        }
        if self.fault.copies_go_astray && destination.buffer.kind() == MemoryKind::Pinned {
            let before = self.on_host.replace(destination.clone());
            let before = before.filter(|before| before.bytes == destination.bytes);
            return self.inner.copy(source, before.as_ref().unwrap_or(destination));
        }
        self.inner.copy(source, destination)
    }

    fn fill(&mut self, destination: &BufferSlice, byte: u8) -> Result<()> {
        self.inner.fill(destination, byte)
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        self.inner.record(event)
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        self.inner.wait(event)
    }

    fn synchronize(&mut self, what: &str, timeout: Duration) -> Result<()> {
        self.inner.synchronize(what, timeout)
    }
}

/// An event that no stream knows.
#[derive(Debug)]
pub(crate) struct MutantEvent(pub(crate) Arc<dyn Event>);

impl Event for MutantEvent {
    fn reached(&self) -> Result<bool> {
        self.0.reached()
    }

    fn synchronize(&self, what: &str, timeout: Duration) -> Result<()> {
        self.0.synchronize(what, timeout)
    }

    fn elapsed_since(&self, earlier: &dyn Event) -> Result<Option<Duration>> {
        self.0.elapsed_since(earlier)
    }
}
