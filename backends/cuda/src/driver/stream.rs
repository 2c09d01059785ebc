//! Streams and events. The host never blocks inside the driver: every wait polls, and has a limit.

use crate::driver::{
    context::{Context, OWN_TIMEOUT},
    graph::{FewWords, Replay},
    kernel_spec::KernelSpec,
    launch::{Function, LaunchOp, Launches, Parameters},
    memory::CudaBuffer,
    raw::{Raw, RawEvent, RawStream},
    rendezvous::{Gatherings, Watched},
};
use cudarc::driver::sys::{self, CUevent};
use dsrun_core::{
    Code, Error, Result,
    device::{Buffer, BufferSlice, Event, MemoryKind, Stream},
};
use std::{
    any::Any,
    cell::OnceCell,
    ptr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// Threads of a block of the kernel that copies a few words.
const THREADS: usize = 256;
/// Bytes of a chunk of staging memory.
const PIECE: usize = 1 << 20;
/// Chunks in the ring buffer: the host fills one while the copies of the others are in flight.
const PIECES: usize = 4;
/// The maximum number of bytes that a kernel copies between host and device.
const FEW: usize = 32 << 10;
/// The first driver that has `cuEventElapsedTime_v2`: 12.8.
const TIMED_DRIVER: i32 = 12_080;

/// The kernel that copies a few words between host and device.
pub fn copy_kernel() -> KernelSpec {
    KernelSpec::new("copy/copy.cu", "copy", [])
}

/// A queue of work.
#[derive(Debug)]
pub(crate) struct CudaStream {
    pub(crate) context: Arc<Context>,
    pub(crate) raw: RawStream,
    /// Pinned memory that uploads and downloads go through, and for each chunk the event after its last copy.
    staging: Option<(CudaBuffer, Vec<CudaEvent>)>,
    /// The current chunk, and the number of bytes used in it.
    position: (usize, usize),
    /// The kernel that copies a few words; `None` if kernels cannot be compiled.
    copier: OnceCell<Option<Arc<Function>>>,
    /// Records calls instead of enqueuing them, while a graph is captured.
    pub(crate) recorded: Option<Vec<Launches>>,
    /// A graph whose launch is delayed until the next command.
    put_off: Option<Arc<Replay>>,
    /// The groups whose collectives were enqueued: waits also check whether another rank has aborted them.
    watched: Watched,
}

impl CudaStream {
    pub(crate) fn new(context: Arc<Context>) -> Result<Self> {
        let raw = context.add_stream()?;
        Ok(Self {
            context,
            raw,
            staging: None,
            position: (0, 0),
            copier: OnceCell::new(),
            recorded: None,
            put_off: None,
            watched: Watched::default(),
        })
    }

    /// Downcasts a stream that belongs to this handle, and launches its delayed graph.
    pub(crate) fn own<'a>(stream: &'a mut dyn Stream, context: &Arc<Context>) -> Result<&'a mut Self> {
        let own = stream.own(|own: &Self| Arc::ptr_eq(&own.context, context))?;
        own.launch_put_off()?;
        Ok(own)
    }

    /// Launches a graph now, or delays it until the next command.
    pub(crate) fn launch(&mut self, graph: &Arc<Replay>) -> Result<()> {
        if graph.is_short() {
            self.put_off = Some(graph.clone());
            return Ok(());
        }
        graph.launch(self)
    }

    /// Launches the delayed graph, before anything else is enqueued.
    fn launch_put_off(&mut self) -> Result<()> {
        self.put_off.take().map_or(Ok(()), |graph| graph.launch(self))
    }

    /// Enqueues collectives when their groups are ready for it.
    pub(crate) fn gathered(
        &mut self,
        gatherings: &Gatherings,
        enqueue: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.watched.add(gatherings.groups());
        gatherings.before()?;
        enqueue(self)?;
        gatherings.after()
    }

    pub(crate) fn wait_idle(&self, what: &str, timeout: Duration) -> Result<()> {
        // SAFETY: the stream is live.
        let query = || unsafe { sys::cuStreamQuery(self.raw.0) };
        self.context.wait_until(what, timeout, &self.watched, query)
    }

    /// The device address of a host address in the staging memory.
    fn seen_by_device(&self, staged: *mut u8) -> u64 {
        let base = self.staging.as_ref().and_then(|(buffer, _)| Some((buffer.host()?, buffer.pointer)));
        base.map_or(0, |(host, pointer)| pointer + (staged.addr() - host.addr()) as u64)
    }

    /// Copies a few words between pinned memory and the device by a kernel, which may become part of the delayed graph. Returns
    /// false if the kernel cannot make this copy.
    fn copy_few(&mut self, copy: FewWords) -> Result<bool> {
        let Some(step) = self.step_of(copy) else { return Ok(false) };
        if let Some(graph) = self.put_off.take() {
            if graph.launch_with(self, copy, &step)? {
                return Ok(true);
            }
            graph.launch(self)?;
        }
        let context = self.context.clone();
        step.enqueue(&context, self).map(|()| true)
    }

    /// The launch that copies a few whole words; `None` for other copies.
    fn step_of(&self, FewWords { to, from, bytes }: FewWords) -> Option<LaunchOp> {
        let words = size_of::<u32>();
        let whole = (to | from).is_multiple_of(words as u64) && bytes.is_multiple_of(words);
        if !whole || bytes > FEW {
            return None;
        }
        let function = self.copier.get_or_init(|| self.context.function(&copy_kernel()).ok()).as_ref()?;
        let count = bytes / words;
        let parameters = Parameters::default().size(count).address(from).address(to);
        LaunchOp::kernel(function, [count.div_ceil(THREADS), 1, 1], THREADS, parameters)
    }

    /// Takes up to `wanted` bytes of staging memory: host address and length. Waits for the copy that used them before.
    fn stage(&mut self, wanted: usize) -> Result<(*mut u8, usize)> {
        if self.staging.is_none() {
            let buffer = CudaBuffer::new(self.context.clone(), PIECE * PIECES, MemoryKind::Pinned)?;
            let events = (0..PIECES).map(|_| CudaEvent::new(self.context.clone())).collect::<Result<_>>()?;
            self.staging = Some((buffer, events));
        }
        let (buffer, events) = self.staging.as_ref().ok_or_else(|| Error::internal("no staging memory"))?;
        let (mut piece, mut start) = self.position;
        if start == PIECE {
            events[piece].record_on(self.raw)?;
            (piece, start) = ((piece + 1) % PIECES, 0);
            events[piece].wait_for("staging memory", OWN_TIMEOUT)?;
        }
        let bytes = wanted.min(PIECE - start);
        // Copies start at multiples of 16 bytes, which is faster.
        self.position = (piece, (start + bytes).next_multiple_of(16).min(PIECE));
        let host = buffer.host().ok_or_else(|| Error::internal("staging memory is not on the host"))?;
        // SAFETY: `piece < PIECES` and `start <= PIECE`, so this is inside the buffer.
        Ok((unsafe { host.add(piece * PIECE + start) }, bytes))
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if let Err(error) = self.launch_put_off() {
            tracing::debug!(%error, "a stream ends without its last graph");
        }
        self.context.remove_stream(self.raw);
    }
}

fn equal_lengths(source: usize, destination: usize) -> Result<()> {
    if source == destination {
        return Ok(());
    }
    let message = format!("is {destination} bytes, but the source is {source}");
    Err(Error::invalid(message).at("destination").field("bytes"))
}

impl Stream for CudaStream {
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()> {
        equal_lengths(source.len(), destination.bytes)?;
        let (_buffer, mut to) =
            CudaBuffer::locate(destination, &self.context).map_err(|e| e.at("destination"))?;
        self.context.enter()?;
        self.launch_put_off()?;
        let mut rest = source;
        while !rest.is_empty() {
            let (staged, bytes) = self.stage(rest.len())?;
            let (now, later) = rest.split_at(bytes);
            // SAFETY: `staged` is `bytes` of pinned memory that no copy under way uses.
            unsafe { ptr::copy_nonoverlapping(now.as_ptr(), staged, bytes) };
            if !self.copy_few(FewWords { to, from: self.seen_by_device(staged), bytes })? {
                // SAFETY: the destination was checked. Both live until the copy is done: the buffer's free is ordered
                // behind it.
                let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to, staged.cast(), bytes, self.raw.0) };
                self.context.check(status, "uploading")?;
            }
            (rest, to) = (later, to + bytes as u64);
        }
        Ok(())
    }

    fn download(
        &mut self,
        source: &BufferSlice,
        destination: &mut [u8],
        what: &str,
        timeout: Duration,
    ) -> Result<()> {
        equal_lengths(source.bytes, destination.len())?;
        let (_buffer, mut from) = CudaBuffer::locate(source, &self.context).map_err(|e| e.at("source"))?;
        self.context.enter()?;
        self.launch_put_off()?;
        self.wait_idle(what, timeout)?;
        let mut rest = destination;
        while !rest.is_empty() {
            let (staged, bytes) = self.stage(rest.len())?;
            // SAFETY: as in `upload`.
            let status = unsafe { sys::cuMemcpyDtoHAsync_v2(staged.cast(), from, bytes, self.raw.0) };
            self.context.check(status, "downloading")?;
            self.wait_idle(what, timeout)?;
            let (now, later) = rest.split_at_mut(bytes);
            // SAFETY: the copy is done, so the staging memory is ours to read.
            unsafe { ptr::copy_nonoverlapping(staged, now.as_mut_ptr(), bytes) };
            (rest, from) = (later, from + bytes as u64);
        }
        Ok(())
    }

    fn copy(&mut self, source: &BufferSlice, destination: &BufferSlice) -> Result<()> {
        equal_lengths(source.bytes, destination.bytes)?;
        let (source_buffer, from) = CudaBuffer::locate(source, &self.context).map_err(|e| e.at("source"))?;
        let (buffer, to) = CudaBuffer::locate(destination, &self.context).map_err(|e| e.at("destination"))?;
        if source.overlaps(destination) {
            return Err(Error::invalid("overlaps the source").at("destination"));
        }
        self.context.enter()?;
        if source.bytes == 0 {
            return Ok(());
        }
        let pinned = source_buffer.kind() == MemoryKind::Pinned || buffer.kind() == MemoryKind::Pinned;
        if pinned && self.copy_few(FewWords { to, from, bytes: source.bytes })? {
            return Ok(());
        }
        self.launch_put_off()?;
        // SAFETY: both ranges were checked, and stay as long as the copy runs.
        let status = unsafe { sys::cuMemcpyAsync(to, from, source.bytes, self.raw.0) };
        self.context.check(status, "copying on the device")
    }

    fn fill(&mut self, destination: &BufferSlice, byte: u8) -> Result<()> {
        let (_buffer, to) =
            CudaBuffer::locate(destination, &self.context).map_err(|e| e.at("destination"))?;
        self.context.enter()?;
        self.launch_put_off()?;
        if destination.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the range was checked, and stays as long as the fill runs.
        let status = unsafe { sys::cuMemsetD8Async(to, byte, destination.bytes, self.raw.0) };
        self.context.check(status, "filling memory")
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        let event = CudaEvent::own(event)?;
        self.context.enter()?;
        self.launch_put_off()?;
        event.watch(&self.watched);
        event.record_on(self.raw)
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        let event = CudaEvent::own(event)?;
        self.context.enter()?;
        self.launch_put_off()?;
        // SAFETY: event and stream are live. An event that was never recorded is not waited for.
        let status = unsafe { sys::cuStreamWaitEvent(self.raw.0, event.raw.0, 0) };
        self.context.check(status, "ordering streams")
    }

    fn synchronize(&mut self, what: &str, timeout: Duration) -> Result<()> {
        self.context.enter()?;
        self.launch_put_off()?;
        self.wait_idle(what, timeout)
    }
}

/// An event: a point in a stream.
#[derive(Debug)]
pub(crate) struct CudaEvent {
    context: Arc<Context>,
    raw: RawEvent,
    recorded: AtomicBool,
    /// The watched groups of the stream that it was recorded on.
    watched: Mutex<Watched>,
}

impl CudaEvent {
    pub(crate) fn new(context: Arc<Context>) -> Result<Self> {
        context.enter()?;
        let mut raw: CUevent = ptr::null_mut();
        // SAFETY: the pointer is to a place of the right type.
        context.check(unsafe { sys::cuEventCreate(&raw mut raw, 0) }, "making an event")?;
        Ok(Self { context, raw: Raw(raw), recorded: AtomicBool::new(false), watched: Mutex::default() })
    }

    fn own(event: &dyn Event) -> Result<&Self> {
        let own = (event as &dyn Any).downcast_ref::<Self>();
        own.ok_or_else(|| Error::invalid("belongs to another backend").at("event"))
    }

    fn record_on(&self, stream: RawStream) -> Result<()> {
        // SAFETY: event and stream are live.
        self.context.check(unsafe { sys::cuEventRecord(self.raw.0, stream.0) }, "recording an event")?;
        self.recorded.store(true, Ordering::Release);
        Ok(())
    }

    fn watch(&self, watched: &Watched) {
        *self.watched.lock().unwrap_or_else(PoisonError::into_inner) = watched.clone();
    }

    fn watched(&self) -> Watched {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn wait_for(&self, what: &str, timeout: Duration) -> Result<()> {
        // SAFETY: the event is live.
        self.context.wait_until(what, timeout, &self.watched(), || unsafe { sys::cuEventQuery(self.raw.0) })
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.context.enter_anyway().is_ok() {
            // SAFETY: the event is live and used no more; the driver keeps it until it is reached.
            unsafe { sys::cuEventDestroy_v2(self.raw.0) };
        }
    }
}

impl Event for CudaEvent {
    fn reached(&self) -> Result<bool> {
        self.context.enter()?;
        // SAFETY: the event is live.
        match unsafe { sys::cuEventQuery(self.raw.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => self.watched().check().map(|()| false),
            status => {
                self.context.check(status, "asking for an event")?;
                self.watched().check().map(|()| true)
            }
        }
    }

    fn synchronize(&self, what: &str, timeout: Duration) -> Result<()> {
        self.context.enter()?;
        self.wait_for(what, timeout)
    }

    fn elapsed_since(&self, earlier: &dyn Event) -> Result<Option<Duration>> {
        let earlier = Self::own(earlier)?;
        self.context.enter()?;
        for (event, name) in [(earlier, "earlier"), (self, "event")] {
            if !event.recorded.load(Ordering::Acquire) {
                return Err(Error::invalid("was never recorded").at(name));
            }
            if !event.reached()? {
                return Err(Error::new(Code::FailedPrecondition, "is not reached yet").at(name));
            }
        }
        if self.context.driver < TIMED_DRIVER {
            return Ok(None);
        }
        let mut milliseconds: f32 = 0.0;
        // SAFETY: both events are live and were recorded.
        let status = unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, earlier.raw.0, self.raw.0) };
        self.context.check(status, "reading the time between events")?;
        Ok(Some(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3)))
    }
}
