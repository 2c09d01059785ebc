//! A test device whose streams run side by side: work waits in queues, and runs as late or as early as events allow.
//!
//! The first stream that is made is that of the steps. Its work runs when the host waits for it. All other streams run as a
//! [`Pace`] says. What an event should order and does not order therefore goes wrong every time, not only on an unlucky run.

use dsrun_core::{
    Error, Result, WeightReader,
    checked::{ValidArguments, ValidCall},
    device::{
        Backend, Buffer, BufferSlice, Device, DeviceOptions, DeviceProperties, Event, MemoryKind, MemoryUse,
        Stream,
    },
    kernels::{BoundCall, Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc},
};
use std::{
    any::Any,
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

/// When streams other than the first run their work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// When another stream or the host waits for it.
    Late,
    /// As soon as it is enqueued and the events it waits for are reached.
    Early,
}

/// A wait for an event that the device leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The first stream does not wait for others: a copy is not awaited.
    CopyNotAwaited,
    /// Other streams do not wait for the first: a slot is reused too early.
    SlotReusedEarly,
    /// The host does not wait for other streams: memory is read into before its copy.
    HostDoesNotWait,
}

#[derive(Debug)]
pub(crate) struct LaggingDevice {
    inner: Arc<dyn Device>,
    properties: DeviceProperties,
    world: Arc<Mutex<World>>,
}

#[derive(Debug)]
struct World {
    inner: Box<dyn Stream>,
    pace: Pace,
    fault: Option<Fault>,
    queues: Vec<VecDeque<Work>>,
    events: Vec<Point>,
}

/// How often an event was recorded and reached, and by which stream it was recorded last.
#[derive(Clone, Copy, Debug, Default)]
struct Point {
    recorded: u64,
    reached: u64,
    stream: usize,
}

#[derive(Debug)]
enum Work {
    Upload(Vec<u8>, BufferSlice),
    Copy(BufferSlice, BufferSlice),
    Fill(BufferSlice, u8),
    Call(SharedCall),
    Record(usize, u64),
    Wait(usize, u64),
}

type SharedCall = Arc<Mutex<Box<dyn BoundCall>>>;

impl World {
    fn push(&mut self, stream: usize, work: Work) -> Result<()> {
        self.queues[stream].push_back(work);
        self.run_early()
    }

    /// Runs the first piece of work of a stream; whether there was one that could run.
    fn step(&mut self, stream: usize) -> Result<bool> {
        if let Some(Work::Wait(event, count)) = self.queues[stream].front()
            && self.events[*event].reached < *count
        {
            return Ok(false);
        }
        let Some(work) = self.queues[stream].pop_front() else { return Ok(false) };
        match work {
            Work::Upload(bytes, destination) => self.inner.upload(&bytes, &destination)?,
            Work::Copy(source, destination) => self.inner.copy(&source, &destination)?,
            Work::Fill(destination, byte) => self.inner.fill(&destination, byte)?,
            Work::Call(call) => call.lock().expect("nothing panics with it").enqueue(&mut *self.inner)?,
            Work::Record(event, count) => self.events[event].reached = self.events[event].reached.max(count),
            Work::Wait(..) => {}
        }
        Ok(true)
    }

    /// Runs the work of a stream until a condition holds, and that of other streams where it waits for them.
    fn run(&mut self, stream: usize, until: &dyn Fn(&Self) -> bool) -> Result<()> {
        while !until(self) {
            if let Some(Work::Wait(event, count)) = self.queues[stream].front()
                && self.events[*event].reached < *count
            {
                let (event, count) = (*event, *count);
                self.run_to(event, count)?;
                // That may have run this stream as well.
                continue;
            }
            if !self.step(stream)? {
                return Err(Error::internal("streams wait for each other"));
            }
            self.run_early()?;
        }
        Ok(())
    }

    fn run_to(&mut self, event: usize, count: u64) -> Result<()> {
        if self.events[event].reached >= count {
            return Ok(());
        }
        self.run(self.events[event].stream, &|world| world.events[event].reached >= count)
    }

    fn run_early(&mut self) -> Result<()> {
        if self.pace == Pace::Early {
            for stream in 1..self.queues.len() {
                while self.step(stream)? {}
            }
        }
        Ok(())
    }
}

impl LaggingDevice {
    pub(crate) fn open(options: &DeviceOptions, pace: Pace, fault: Option<Fault>) -> Arc<Self> {
        let inner = dsrun_cpu::CpuBackend::new().open(0, options).expect("a CPU is there");
        // A device with memory of its own.
        let properties = DeviceProperties { unified_memory: false, ..inner.properties().clone() };
        let stream = inner.stream().expect("the CPU has streams");
        let world = World { inner: stream, pace, fault, queues: Vec::new(), events: Vec::new() };
        Arc::new(Self { inner, properties, world: Arc::new(Mutex::new(world)) })
    }

    /// A device that takes no tensors in pinned memory.
    #[allow(dead_code, reason = "one of the tests that share this needs it")]
    pub(crate) fn unpinned() -> Arc<Self> {
        let mut device = Self::open(&DeviceOptions::default(), Pace::Early, None);
        Arc::get_mut(&mut device).expect("it was just made").properties.binds_pinned = false;
        device
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().expect("nothing panics with it")
    }
}

#[derive(Debug)]
struct LaggingEvent {
    index: usize,
    world: Arc<Mutex<World>>,
}

impl Event for LaggingEvent {
    fn reached(&self) -> Result<bool> {
        let point = self.world.lock().expect("nothing panics with it").events[self.index];
        Ok(point.reached >= point.recorded)
    }

    fn synchronize(&self, _: &str, _: Duration) -> Result<()> {
        let mut world = self.world.lock().expect("nothing panics with it");
        let Point { recorded: count, stream, .. } = world.events[self.index];
        if stream != 0 && world.fault == Some(Fault::HostDoesNotWait) {
            return Ok(());
        }
        world.run_to(self.index, count)
    }

    fn elapsed_since(&self, _: &dyn Event) -> Result<Option<Duration>> {
        Ok(None)
    }
}

#[derive(Debug)]
struct LaggingStream {
    index: usize,
    world: Arc<Mutex<World>>,
}

impl LaggingStream {
    fn of(stream: &mut dyn Stream) -> Result<&mut Self> {
        let any: &mut dyn Any = stream;
        any.downcast_mut::<Self>().ok_or_else(|| Error::internal("another device's stream"))
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().expect("nothing panics with it")
    }

    fn finish(&self) -> Result<MutexGuard<'_, World>> {
        let (index, mut world) = (self.index, self.world());
        world.run(index, &|world| world.queues[index].is_empty())?;
        Ok(world)
    }
}

fn index_of(event: &dyn Event) -> Result<usize> {
    let any: &dyn Any = event;
    let own = any.downcast_ref::<LaggingEvent>();
    own.map(|event| event.index).ok_or_else(|| Error::internal("another device's event"))
}

impl Stream for LaggingStream {
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()> {
        self.world().push(self.index, Work::Upload(source.to_vec(), destination.clone()))
    }

    fn download(
        &mut self,
        source: &BufferSlice,
        destination: &mut [u8],
        what: &str,
        timeout: Duration,
    ) -> Result<()> {
        self.finish()?.inner.download(source, destination, what, timeout)
    }

    fn copy(&mut self, source: &BufferSlice, destination: &BufferSlice) -> Result<()> {
        self.world().push(self.index, Work::Copy(source.clone(), destination.clone()))
    }

    fn fill(&mut self, destination: &BufferSlice, byte: u8) -> Result<()> {
        self.world().push(self.index, Work::Fill(destination.clone(), byte))
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        let (event, mut world) = (index_of(event)?, self.world());
        let point = &mut world.events[event];
        point.recorded += 1;
        point.stream = self.index;
        let count = point.recorded;
        world.push(self.index, Work::Record(event, count))
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        let (event, mut world) = (index_of(event)?, self.world());
        let left_out = if self.index == 0 { Fault::CopyNotAwaited } else { Fault::SlotReusedEarly };
        if world.fault == Some(left_out) {
            return Ok(());
        }
        let count = world.events[event].recorded;
        world.push(self.index, Work::Wait(event, count))
    }

    fn synchronize(&mut self, _: &str, _: Duration) -> Result<()> {
        self.finish().map(drop)
    }
}

impl Device for LaggingDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&self) -> MemoryUse {
        self.inner.memory()
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        self.inner.allocate(bytes, kind)
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        let mut world = self.world();
        world.queues.push(VecDeque::new());
        Ok(Box::new(LaggingStream { index: world.queues.len() - 1, world: self.world.clone() }))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        let mut world = self.world();
        world.events.push(Point::default());
        Ok(Arc::new(LaggingEvent { index: world.events.len() - 1, world: self.world.clone() }))
    }

    fn kernels(&self) -> &dyn Kernels {
        self
    }
}

impl Kernels for LaggingDevice {
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
        let mut world = LaggingStream::of(stream)?.finish()?;
        self.inner.kernels().prepack(&mut *world.inner, weight, rows)
    }

    fn copy_packed(
        &self,
        stream: &mut dyn Stream,
        weight: &Arc<dyn PackedWeight>,
        destination: &BufferSlice,
    ) -> Result<()> {
        let mut world = LaggingStream::of(stream)?.finish()?;
        self.inner.kernels().copy_packed(&mut *world.inner, weight, destination)
    }

    fn adopt(&self, weight: &WeightDesc, memory: &BufferSlice) -> Result<Arc<dyn PackedWeight>> {
        self.inner.kernels().adopt(weight, memory)
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        Ok(Arc::new(LaggingPlan(self.inner.kernels().plan(call)?)))
    }
}

#[derive(Debug)]
struct LaggingPlan(Arc<dyn Plan>);

impl Plan for LaggingPlan {
    fn workspace_bytes(&self) -> usize {
        self.0.workspace_bytes()
    }

    fn bind(self: Arc<Self>, arguments: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        Ok(Box::new(LaggingCall(Arc::new(Mutex::new(self.0.clone().bind(arguments)?)))))
    }
}

#[derive(Debug)]
struct LaggingCall(SharedCall);

impl BoundCall for LaggingCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        let stream = LaggingStream::of(stream)?;
        stream.world().push(stream.index, Work::Call(self.0.clone()))
    }
}
