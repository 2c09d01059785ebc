//! An asynchronous test device: its events are reached only once the host waits for them. It counts launches ahead, uploads
//! and copies.

use super::device;
use dsrun_core::{
    Code, Error, Result,
    checked::{ValidArguments, ValidCall},
    device::{BufferSlice, Device, Event, Stream},
    kernels::{BoundCall, Plan},
};
use dsrun_test_support::{Front, FrontDevice};
use std::{
    any::Any,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

#[derive(Debug)]
pub(crate) struct LateDevice {
    inner: Arc<dyn Device>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    open: AtomicUsize,
    ahead: AtomicUsize,
    uploads: AtomicUsize,
    copies: AtomicUsize,
    fault: Mutex<Option<Fault>>,
}

/// A fault that the next wait for the device triggers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The device reports that it is lost.
    Lost,
    /// The backend panics.
    Panic,
}

impl LateDevice {
    pub(crate) fn open() -> Arc<FrontDevice<Self>> {
        Arc::new(FrontDevice(Self { inner: device(), counts: Arc::default() }))
    }

    /// The number of events recorded while an earlier one had not been waited for.
    pub(crate) fn ahead(&self) -> usize {
        self.counts.ahead.load(Ordering::Relaxed)
    }

    /// The numbers of uploads and copies.
    pub(crate) fn transfers(&self) -> [usize; 2] {
        [&self.counts.uploads, &self.counts.copies].map(|count| count.load(Ordering::Relaxed))
    }

    /// Blocks waits for the device until the guard is dropped. A fault that is put into it is triggered then.
    pub(crate) fn hold(&self) -> MutexGuard<'_, Option<Fault>> {
        self.counts.fault.lock().expect("nothing panics with it")
    }
}

#[derive(Debug)]
struct LateEvent {
    inner: Arc<dyn Event>,
    pending: AtomicBool,
    counts: Arc<Counts>,
}

impl LateEvent {
    fn record(&self) {
        if self.counts.open.load(Ordering::Relaxed) > 0 {
            self.counts.ahead.fetch_add(1, Ordering::Relaxed);
        }
        if !self.pending.swap(true, Ordering::Relaxed) {
            self.counts.open.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Event for LateEvent {
    fn reached(&self) -> Result<bool> {
        Ok(!self.pending.load(Ordering::Relaxed))
    }

    fn synchronize(&self, what: &str, timeout: Duration) -> Result<()> {
        if self.pending.swap(false, Ordering::Relaxed) {
            self.counts.open.fetch_sub(1, Ordering::Relaxed);
        }
        let fault = *self.counts.fault.lock().expect("nothing panics with it");
        match fault {
            Some(Fault::Lost) => Err(Error::new(Code::DeviceLost, "a test took the device away")),
            Some(Fault::Panic) => panic!("a test made this panic"),
            None => self.inner.synchronize(what, timeout),
        }
    }

    fn elapsed_since(&self, _: &dyn Event) -> Result<Option<Duration>> {
        Ok(None)
    }
}

#[derive(Debug)]
struct LateStream(Box<dyn Stream>, Arc<Counts>);

impl LateStream {
    fn inner(stream: &mut dyn Stream) -> Result<&mut dyn Stream> {
        let any: &mut dyn Any = stream;
        let own = any.downcast_mut::<Self>();
        own.map(|own| &mut *own.0).ok_or_else(|| Error::internal("another device's stream"))
    }
}

impl Stream for LateStream {
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()> {
        self.1.uploads.fetch_add(1, Ordering::Relaxed);
        self.0.upload(source, destination)
    }

    fn download(
        &mut self,
        source: &BufferSlice,
        destination: &mut [u8],
        what: &str,
        timeout: Duration,
    ) -> Result<()> {
        self.0.download(source, destination, what, timeout)
    }

    fn copy(&mut self, source: &BufferSlice, destination: &BufferSlice) -> Result<()> {
        self.1.copies.fetch_add(1, Ordering::Relaxed);
        self.0.copy(source, destination)
    }

    fn fill(&mut self, destination: &BufferSlice, byte: u8) -> Result<()> {
        self.0.fill(destination, byte)
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        let event = (event as &dyn Any).downcast_ref::<LateEvent>();
        let event = event.ok_or_else(|| Error::internal("another device's event"))?;
        event.record();
        self.0.record(&*event.inner)
    }

    fn wait(&mut self, _: &dyn Event) -> Result<()> {
        Ok(())
    }

    fn synchronize(&mut self, what: &str, timeout: Duration) -> Result<()> {
        self.0.synchronize(what, timeout)
    }
}

impl Front for LateDevice {
    fn behind(&self) -> &dyn Device {
        &*self.inner
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(LateStream(self.inner.stream()?, self.counts.clone())))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        let (inner, counts) = (self.inner.event()?, self.counts.clone());
        Ok(Arc::new(LateEvent { inner, pending: AtomicBool::new(false), counts }))
    }

    fn stream_behind<'a>(&self, stream: &'a mut dyn Stream) -> Result<&'a mut dyn Stream> {
        LateStream::inner(stream)
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        Ok(Arc::new(LatePlan(self.inner.kernels().plan(call)?)))
    }
}

#[derive(Debug)]
struct LatePlan(Arc<dyn Plan>);

impl Plan for LatePlan {
    fn workspace_bytes(&self) -> usize {
        self.0.workspace_bytes()
    }

    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        Ok(Box::new(LateCall(self.0.clone().bind(arguments)?)))
    }
}

#[derive(Debug)]
struct LateCall(Box<dyn BoundCall>);

impl BoundCall for LateCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        self.0.enqueue(LateStream::inner(stream)?)
    }
}
