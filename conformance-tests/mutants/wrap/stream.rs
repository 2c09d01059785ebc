//! Streams and events of the CPU backend, with a fault.

use crate::{
    faults::Fault,
    late::{self, LateEvent},
};
use dsrun_core::{
    Result,
    device::{BufferSlice, Event, MemoryKind, Stream},
};
use std::{
    any::Any,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

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

/// What is wrong with a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamFault {
    /// A copy has a multiple of four bytes.
    CopiesWords,
    /// A copy begins at a multiple of four bytes of its source.
    CopiesFromWords,
    /// A fill has a multiple of four bytes.
    FillsWords,
    /// An upload begins at a multiple of four bytes.
    UploadsToWords,
    /// Uploads are done when the stream is waited for, after the calls behind them.
    UploadsLate,
    /// Nothing: work is done late, and everyone waits for it.
    Late,
    /// Work is done late, and other streams do not wait for it.
    WaitsIgnored,
    /// Work is done late, and events are reached before.
    EventsEarly,
    /// Work is done late, and never if its call is freed before.
    FreedForgotten,
}

impl StreamFault {
    /// Whether calls and copies are done late.
    pub(crate) fn is_late(self) -> bool {
        matches!(self, Self::Late | Self::WaitsIgnored | Self::EventsEarly | Self::FreedForgotten)
    }
}

impl MutantStream {
    fn is_late(&self) -> bool {
        self.fault.stream.is_some_and(StreamFault::is_late)
    }

    /// Does what is still to be done.
    fn finish(&mut self) -> Result<()> {
        match self.fault.stream {
            Some(fault) if fault.is_late() || fault == StreamFault::UploadsLate => {
                late::finish(self.number, &mut *self.inner)
            }
            _ => Ok(()),
        }
    }
}

/// A slice that begins at a multiple of four bytes.
fn aligned(slice: &BufferSlice) -> BufferSlice {
    BufferSlice { offset: slice.offset & !3, ..slice.clone() }
}

impl Stream for MutantStream {
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()> {
        match self.fault.stream {
            Some(StreamFault::UploadsToWords) => self.inner.upload(source, &aligned(destination)),
            Some(StreamFault::UploadsLate) if source.len() == destination.bytes => {
                late::postpone(self.number, destination, source.to_vec());
                Ok(())
            }
            _ => {
                self.finish()?;
                self.inner.upload(source, destination)
            }
        }
    }

    fn download(
        &mut self,
        source: &BufferSlice,
        destination: &mut [u8],
        what: &str,
        timeout: Duration,
    ) -> Result<()> {
        self.finish()?;
        self.inner.download(source, destination, what, timeout)
    }

    fn copy(&mut self, source: &BufferSlice, destination: &BufferSlice) -> Result<()> {
        let overlap = source.overlaps(destination);
        if self.fault.copies_overlap && overlap {
            let mut bytes = vec![0; source.bytes];
            self.inner.download(source, &mut bytes, "a copy onto itself", Duration::from_secs(30))?;
            return self.inner.upload(&bytes, destination);
        }
        if self.fault.copies_go_astray && destination.buffer.kind() == MemoryKind::Pinned {
            let before = self.on_host.replace(destination.clone());
            let before = before.filter(|before| before.bytes == destination.bytes);
            return self.inner.copy(source, before.as_ref().unwrap_or(destination));
        }
        match self.fault.stream {
            Some(StreamFault::CopiesWords) if source.bytes == destination.bytes => {
                let words = source.bytes & !3;
                self.inner.copy(&source.slice(0, words)?, &destination.slice(0, words)?)
            }
            Some(StreamFault::CopiesFromWords) => self.inner.copy(&aligned(source), destination),
            _ if self.is_late() => {
                let (number, slices) = (self.number, [destination.clone()]);
                let copy = |stream: &mut dyn Stream| stream.copy(source, destination);
                late::postponed(number, 0, &mut *self.inner, &slices, copy)
            }
            _ => self.inner.copy(source, destination),
        }
    }

    fn fill(&mut self, destination: &BufferSlice, byte: u8) -> Result<()> {
        self.finish()?;
        if self.fault.stream == Some(StreamFault::FillsWords) {
            let bytes = destination.bytes & !3;
            return self.inner.fill(&BufferSlice { bytes, ..destination.clone() }, byte);
        }
        self.inner.fill(destination, byte)
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        let any: &dyn Any = event;
        match any.downcast_ref::<LateEvent>() {
            Some(late) => {
                late.recorded.store(self.number, Ordering::SeqCst);
                self.inner.record(&*late.inner)
            }
            None => self.inner.record(event),
        }
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        let any: &dyn Any = event;
        let Some(late) = any.downcast_ref::<LateEvent>() else { return self.inner.wait(event) };
        if self.fault.stream != Some(StreamFault::WaitsIgnored) {
            late::finish(late.recorded.load(Ordering::SeqCst), &mut *self.inner)?;
        }
        self.inner.wait(&*late.inner)
    }

    fn synchronize(&mut self, what: &str, timeout: Duration) -> Result<()> {
        self.finish()?;
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
