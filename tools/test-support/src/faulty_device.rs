//! A device whose calls can be made to fail, to panic or to wait.
//!
//! [`FaultyDevice`] runs every call on another device, and counts the calls of each [`Operation`]. A test arms it with a [`Fault`] for
//! the n-th call from then on, or [holds](FaultyDevice::hold) all calls for a while.

use dsrun_core::{
    Code, Error, Result, WeightReader,
    checked::{ValidArguments, ValidCall},
    collective::Collective,
    device::{Buffer, BufferSlice, Device, DeviceProperties, Event, MemoryKind, MemoryUse, Stream},
    graph::{Graph, Graphs},
    kernels::{BoundCall, Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc},
};
use std::{
    any::Any,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// A kind of call to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The allocation of a buffer.
    Allocate,
    /// The creation of a stream or an event.
    Create,
    /// A write from host memory to a buffer.
    Upload,
    /// A read of a buffer into host memory.
    Download,
    /// A copy between buffers, or of a packed weight.
    Copy,
    /// A fill of a buffer.
    Fill,
    /// The recording of an event, or a stream's wait for one.
    Record,
    /// A wait of the host for a stream or an event.
    Wait,
    /// The packing of a weight, or the adoption of a packed one.
    Prepack,
    /// The planning of a call.
    Plan,
    /// The binding of a call to its arguments.
    Bind,
    /// The launch of a call, or its run within a graph.
    Launch,
    /// The capture of calls as a graph.
    Capture,
    /// The launch of a graph.
    Replay,
}

impl Operation {
    /// All kinds of calls.
    pub const ALL: [Self; 14] = [
        Self::Allocate,
        Self::Create,
        Self::Upload,
        Self::Download,
        Self::Copy,
        Self::Fill,
        Self::Record,
        Self::Wait,
        Self::Prepack,
        Self::Plan,
        Self::Bind,
        Self::Launch,
        Self::Capture,
        Self::Replay,
    ];
}

/// The way in which a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call fails with this code; the calls after it work.
    Error(Code),
    /// The device is lost: this call and all calls after it fail with [`Code::DeviceLost`].
    Lost,
    /// The call panics; the calls after it work.
    Panic,
}

/// A device that runs calls on another device, unless a test makes them fail.
#[derive(Debug)]
pub struct FaultyDevice {
    inner: Arc<dyn Device>,
    faults: Arc<Faults>,
}

#[derive(Debug, Default)]
struct Faults {
    state: Mutex<State>,
    /// Notified when calls are no longer held.
    released: Condvar,
}

#[derive(Debug, Default)]
struct State {
    counts: [usize; Operation::ALL.len()],
    armed: Option<(Operation, usize, Fault)>,
    triggered: bool,
    lost: bool,
    /// The guards that make calls wait.
    holds: usize,
}

/// Makes the calls to a [`FaultyDevice`] wait until it is dropped.
#[derive(Debug)]
pub struct Held(Arc<Faults>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.state().holds -= 1;
        self.0.released.notify_all();
    }
}

impl Faults {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call, waits while calls are held, and fails if it is the armed one.
    fn pass(&self, operation: Operation) -> Result<()> {
        let held = |state: &mut State| state.holds > 0;
        let mut state = self.released.wait_while(self.state(), held).unwrap_or_else(PoisonError::into_inner);
        let count = &mut state.counts[operation as usize];
        *count += 1;
        let here = (operation, *count);
        let lost = || Error::new(Code::DeviceLost, "a test took the device away");
        if state.lost {
            return Err(lost());
        }
        let Some((.., fault)) = state.armed.take_if(|(operation, at, _)| (*operation, *at) == here) else {
            return Ok(());
        };
        state.triggered = true;
        state.lost = fault == Fault::Lost;
        drop(state);
        match fault {
            Fault::Error(code) => Err(Error::new(code, format!("a test made {operation:?} fail"))),
            Fault::Lost => Err(lost()),
            Fault::Panic => panic!("a test made {operation:?} panic"),
        }
    }
}

impl FaultyDevice {
    /// A device without faults, until one is [armed](Self::arm).
    pub fn new(inner: Arc<dyn Device>) -> Arc<Self> {
        Arc::new(Self { inner, faults: Arc::default() })
    }

    /// Makes the n-th call of an operation from now on fail; `nth` counts from 1.
    pub fn arm(&self, operation: Operation, nth: usize, fault: Fault) {
        let mut state = self.faults.state();
        state.armed = Some((operation, state.counts[operation as usize] + nth, fault));
        state.triggered = false;
    }

    /// Whether the armed fault has come.
    pub fn has_failed(&self) -> bool {
        self.faults.state().triggered
    }

    /// The number of calls of an operation so far.
    pub fn count(&self, operation: Operation) -> usize {
        self.faults.state().counts[operation as usize]
    }

    /// Makes all calls wait until the guard is dropped.
    pub fn hold(&self) -> Held {
        self.faults.state().holds += 1;
        Held(self.faults.clone())
    }
}

impl Device for FaultyDevice {
    fn properties(&self) -> &DeviceProperties {
        self.inner.properties()
    }

    fn memory(&self) -> MemoryUse {
        self.inner.memory()
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        self.faults.pass(Operation::Allocate)?;
        self.inner.allocate(bytes, kind)
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        self.faults.pass(Operation::Create)?;
        Ok(Box::new(FaultyStream { inner: self.inner.stream()?, faults: self.faults.clone() }))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        self.faults.pass(Operation::Create)?;
        Ok(Arc::new(FaultyEvent { inner: self.inner.event()?, faults: self.faults.clone() }))
    }

    fn kernels(&self) -> &dyn Kernels {
        self
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        self.inner.graphs().map(|_| -> &dyn Graphs { self })
    }

    fn collective(&self) -> Option<&dyn Collective> {
        self.inner.collective()
    }
}

impl Graphs for FaultyDevice {
    fn capture(&self, stream: &mut dyn Stream, calls: Vec<Box<dyn BoundCall>>) -> Result<Box<dyn Graph>> {
        self.faults.pass(Operation::Capture)?;
        let graphs = self.inner.graphs().ok_or_else(|| Error::internal("the device has no graphs"))?;
        let calls = calls.into_iter().map(FaultyCall::captured).collect::<Result<_>>()?;
        let inner = graphs.capture(FaultyStream::inner(stream)?, calls)?;
        Ok(Box::new(FaultyGraph { inner, faults: self.faults.clone() }))
    }
}

#[derive(Debug)]
struct FaultyGraph {
    inner: Box<dyn Graph>,
    faults: Arc<Faults>,
}

impl Graph for FaultyGraph {
    fn launch(&self, stream: &mut dyn Stream) -> Result<()> {
        self.faults.pass(Operation::Replay)?;
        self.inner.launch(FaultyStream::inner(stream)?)
    }
}

#[derive(Debug)]
struct FaultyEvent {
    inner: Arc<dyn Event>,
    faults: Arc<Faults>,
}

impl FaultyEvent {
    fn inner(event: &dyn Event) -> Result<&dyn Event> {
        let any: &dyn Any = event;
        let own = any.downcast_ref::<Self>();
        own.map(|own| &*own.inner).ok_or_else(|| Error::internal("the event is of another device"))
    }
}

impl Event for FaultyEvent {
    fn reached(&self) -> Result<bool> {
        self.inner.reached()
    }

    fn synchronize(&self, what: &str, timeout: Duration) -> Result<()> {
        self.faults.pass(Operation::Wait)?;
        self.inner.synchronize(what, timeout)
    }

    fn elapsed_since(&self, earlier: &dyn Event) -> Result<Option<Duration>> {
        self.inner.elapsed_since(Self::inner(earlier)?)
    }
}

#[derive(Debug)]
struct FaultyStream {
    inner: Box<dyn Stream>,
    faults: Arc<Faults>,
}

impl FaultyStream {
    fn inner(stream: &mut dyn Stream) -> Result<&mut dyn Stream> {
        let any: &mut dyn Any = stream;
        let own = any.downcast_mut::<Self>();
        own.map(|own| &mut *own.inner).ok_or_else(|| Error::internal("the stream is of another device"))
    }
}

impl Stream for FaultyStream {
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()> {
        self.faults.pass(Operation::Upload)?;
        self.inner.upload(source, destination)
    }

    fn download(
        &mut self,
        source: &BufferSlice,
        destination: &mut [u8],
        what: &str,
        timeout: Duration,
    ) -> Result<()> {
        self.faults.pass(Operation::Download)?;
        self.inner.download(source, destination, what, timeout)
    }

    fn copy(&mut self, source: &BufferSlice, destination: &BufferSlice) -> Result<()> {
        self.faults.pass(Operation::Copy)?;
        self.inner.copy(source, destination)
    }

    fn fill(&mut self, destination: &BufferSlice, byte: u8) -> Result<()> {
        self.faults.pass(Operation::Fill)?;
        self.inner.fill(destination, byte)
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        self.faults.pass(Operation::Record)?;
        self.inner.record(FaultyEvent::inner(event)?)
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        self.faults.pass(Operation::Record)?;
        self.inner.wait(FaultyEvent::inner(event)?)
    }

    fn synchronize(&mut self, what: &str, timeout: Duration) -> Result<()> {
        self.faults.pass(Operation::Wait)?;
        self.inner.synchronize(what, timeout)
    }
}

impl Kernels for FaultyDevice {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        self.inner.kernels().query(call)
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        self.inner.kernels().prepack_query(weight)
    }

    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        self.faults.pass(Operation::Prepack)?;
        self.inner.kernels().prepack(FaultyStream::inner(stream)?, weight, rows)
    }

    fn copy_packed(
        &self,
        stream: &mut dyn Stream,
        weight: &Arc<dyn PackedWeight>,
        destination: &BufferSlice,
    ) -> Result<()> {
        self.faults.pass(Operation::Copy)?;
        self.inner.kernels().copy_packed(FaultyStream::inner(stream)?, weight, destination)
    }

    fn adopt(&self, weight: &WeightDesc, memory: &BufferSlice) -> Result<Arc<dyn PackedWeight>> {
        self.faults.pass(Operation::Prepack)?;
        self.inner.kernels().adopt(weight, memory)
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        self.faults.pass(Operation::Plan)?;
        Ok(Arc::new(FaultyPlan { inner: self.inner.kernels().plan(call)?, faults: self.faults.clone() }))
    }
}

#[derive(Debug)]
struct FaultyPlan {
    inner: Arc<dyn Plan>,
    faults: Arc<Faults>,
}

impl Plan for FaultyPlan {
    fn workspace_bytes(&self) -> usize {
        self.inner.workspace_bytes()
    }

    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        self.faults.pass(Operation::Bind)?;
        let inner = self.inner.clone().bind(arguments)?;
        Ok(Box::new(FaultyCall { inner, faults: self.faults.clone() }))
    }
}

#[derive(Debug)]
struct FaultyCall {
    inner: Box<dyn BoundCall>,
    faults: Arc<Faults>,
}

impl BoundCall for FaultyCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        self.faults.pass(Operation::Launch)?;
        self.inner.enqueue(FaultyStream::inner(stream)?)
    }
}

impl FaultyCall {
    /// The call for a graph, which runs it on a stream of the other device.
    fn captured(call: Box<dyn BoundCall>) -> Result<Box<dyn BoundCall>> {
        let any: Box<dyn Any> = call;
        let own = any.downcast::<Self>().map_err(|_| Error::internal("the call is of another device"))?;
        Ok(Box::new(CapturedCall(*own)))
    }
}

#[derive(Debug)]
struct CapturedCall(FaultyCall);

impl BoundCall for CapturedCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        self.0.faults.pass(Operation::Launch)?;
        self.0.inner.enqueue(stream)
    }
}
