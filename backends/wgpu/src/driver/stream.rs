//! Streams and events over the one queue of a device.
//!
//! A stream encodes work into a command buffer and submits it when it holds many dispatches, or when an event is recorded or
//! something waits. All streams of a device share its queue, which runs submissions in order. So waiting for an event of
//! another stream only requires that the event's work was submitted before.

use super::{
    context::Context,
    memory::{Storage, WgpuBuffer},
    pinned::Arrival,
    pipeline::Pipeline,
    timestamp::Timestamp,
    transfer,
};
use dsrun_core::{
    Error, Result,
    device::{BufferSlice, Event, Stream},
};
use std::{
    any::Any,
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use wgpu::{
    BindGroup, BufferDescriptor, BufferUsages, CommandEncoder, CommandEncoderDescriptor, ComputePass,
    ComputePassDescriptor, MapMode, SubmissionIndex,
};

/// The dispatches of a command buffer, and the submissions of a stream that are not done.
#[derive(Clone, Copy, Debug)]
struct Depth {
    /// The number of dispatches after which a command buffer is submitted, so that the device starts while the host encodes.
    dispatches: usize,
    /// The number of submissions beyond which enqueueing waits for the oldest, to bound the work in flight.
    submissions: usize,
}

const DEPTH: Depth = Depth { dispatches: 64, submissions: 8 };
/// The depth for software adapters, where encoding ahead has no benefit and every dispatch is slow.
const SOFTWARE_DEPTH: Depth = Depth { dispatches: 8, submissions: 1 };
/// The longest wait for a submission when too many are in flight.
const IN_FLIGHT_TIMEOUT: Duration = Duration::from_secs(600);
/// The longest wait for a copy into pinned memory that a later copy reads.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(60);
/// Longer timeouts are shortened to this.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// One dispatch of a bound call.
#[derive(Debug)]
pub(crate) struct Dispatch {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) bindings: BindGroup,
    pub(crate) groups: [u32; 3],
}

/// A copy into host memory that starts with the next submission.
struct Delivery {
    staging: wgpu::Buffer,
    /// The requested range of the staging buffer.
    skip: usize,
    bytes: usize,
    arrival: Arrival,
    offset: usize,
}

/// Whether a copy into host memory has arrived.
type Delivered = Arc<AtomicBool>;

fn all_delivered(deliveries: &[Delivered]) -> bool {
    deliveries.iter().all(|delivered| delivered.load(Ordering::Acquire))
}

/// A stream of a device handle.
pub(crate) struct WgpuStream {
    context: Arc<Context>,
    /// Declared before the encoder, which it locks, so that it is dropped first.
    pass: Option<ComputePass<'static>>,
    encoder: Option<CommandEncoder>,
    dispatches: usize,
    /// Whether wgpu holds writes that belong to the next submission.
    writes: bool,
    deliveries: Vec<Delivery>,
    /// The submitted deliveries that may not be done.
    undelivered: Vec<Delivered>,
    last: Option<SubmissionIndex>,
    depth: Depth,
    /// The submissions of dispatches that may not be done, the oldest first.
    in_flight: VecDeque<SubmissionIndex>,
}

impl WgpuStream {
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self {
            depth: if context.spec.software { SOFTWARE_DEPTH } else { DEPTH },
            in_flight: VecDeque::new(),
            context,
            pass: None,
            encoder: None,
            dispatches: 0,
            writes: false,
            deliveries: Vec::new(),
            undelivered: Vec::new(),
            last: None,
        }
    }

    /// Downcasts a stream of this device handle.
    ///
    /// # Errors
    /// If it belongs to another backend or handle.
    pub(crate) fn own<'a>(stream: &'a mut dyn Stream, context: &Arc<Context>) -> Result<&'a mut Self> {
        stream.own(|own: &Self| Arc::ptr_eq(&own.context, context))
    }

    /// The command buffer under construction.
    fn encoder(&mut self) -> &mut CommandEncoder {
        // Commands outside of a pass cannot be encoded while one is open.
        self.pass = None;
        let device = &self.context.device;
        self.encoder.get_or_insert_with(|| {
            device.create_command_encoder(&CommandEncoderDescriptor { label: Some("dsrun") })
        })
    }

    /// Encodes dispatches. Waits if the device is too far behind.
    ///
    /// # Errors
    /// [`dsrun_core::Code::Timeout`] after such a wait; the fault of the device.
    pub(crate) fn dispatch(&mut self, dispatches: &[Dispatch]) -> Result<()> {
        for Dispatch { pipeline, bindings, groups } in dispatches {
            let pass = match &mut self.pass {
                Some(pass) => pass,
                None => {
                    let descriptor = ComputePassDescriptor { label: None, timestamp_writes: None };
                    let pass = self.encoder().begin_compute_pass(&descriptor).forget_lifetime();
                    self.pass.insert(pass)
                }
            };
            pass.set_pipeline(&pipeline.pipeline);
            pass.set_bind_group(0, bindings, &[]);
            pass.dispatch_workgroups(groups[0], groups[1], groups[2]);
            self.dispatches += 1;
        }
        if self.dispatches < self.depth.dispatches {
            return Ok(());
        }
        self.submit();
        self.in_flight.extend(self.last.clone());
        while self.in_flight.len() > self.depth.submissions
            && let Some(oldest) = self.in_flight.pop_front()
        {
            self.context.wait(&oldest, "earlier work of the stream", IN_FLIGHT_TIMEOUT)?;
        }
        Ok(())
    }

    /// Encodes a copy between device buffers, of whole words.
    pub(crate) fn copy_words(&mut self, from: (&wgpu::Buffer, u64), to: (&wgpu::Buffer, u64), bytes: u64) {
        self.encoder().copy_buffer_to_buffer(from.0, from.1, to.0, to.1, bytes);
    }

    /// Submits what is encoded.
    fn submit(&mut self) {
        self.pass = None;
        let encoder = self.encoder.take();
        if encoder.is_none() && !self.writes {
            return;
        }
        self.last = Some(self.context.queue.submit(encoder.map(CommandEncoder::finish)));
        (self.dispatches, self.writes) = (0, false);
        self.undelivered.retain(|delivered| !delivered.load(Ordering::Acquire));
        self.undelivered.extend(self.deliveries.drain(..).map(deliver));
    }

    /// Writes bytes to a device buffer after all work encoded so far. Offset and length are whole words.
    pub(crate) fn write_words(&mut self, buffer: &wgpu::Buffer, offset: u64, bytes: &[u8]) {
        // wgpu puts writes in front of the command buffers of the next submission.
        if self.encoder.is_some() {
            self.submit();
        }
        self.context.queue.write_buffer(buffer, offset, bytes);
        self.writes = true;
    }

    /// Submits, and waits until all submitted work is done.
    fn finish(&mut self, what: &str, timeout: Duration) -> Result<()> {
        self.submit();
        let timeout = timeout.min(LONGEST_TIMEOUT);
        match &self.last {
            Some(last) => self.context.wait(last, what, timeout)?,
            None => self.context.check()?,
        }
        self.context.wait_until(|| all_delivered(&self.undelivered), what, timeout)
    }

    /// Waits for copies in flight into pinned memory that this stream is about to read or overwrite.
    fn settle(&mut self, buffer: &WgpuBuffer) -> Result<()> {
        match &buffer.storage {
            Storage::Host(memory) if memory.is_arriving() => {
                self.finish("a copy into pinned memory", ARRIVAL_TIMEOUT)
            }
            _ => Ok(()),
        }
    }

    fn locate(&self, slice: &BufferSlice, name: &str) -> Result<Arc<WgpuBuffer>> {
        WgpuBuffer::locate(slice, &self.context).map_err(|error| error.at(name))
    }

    /// A new mappable buffer, with a copy of the words that contain a range. Also returns the number of bytes before the range.
    fn stage(&mut self, buffer: &wgpu::Buffer, offset: usize, bytes: usize) -> Result<(wgpu::Buffer, usize)> {
        let skip = offset % 4;
        let length = (skip + bytes).next_multiple_of(4) as u64;
        let descriptor = BufferDescriptor {
            label: Some("staging"),
            size: length,
            usage: BufferUsages::COPY_DST | BufferUsages::MAP_READ,
            mapped_at_creation: false,
        };
        let what = format!("allocating {length} bytes to copy to the host");
        let staging = self.context.scoped(&what, || self.context.device.create_buffer(&descriptor))?;
        self.copy_words((buffer, (offset - skip) as u64), (&staging, 0), length);
        Ok((staging, skip))
    }

    /// Uploads to device memory.
    fn write_device(&mut self, source: &[u8], buffer: &wgpu::Buffer, slice: &BufferSlice) -> Result<()> {
        if source.is_empty() {
            return Ok(());
        }
        let whole = source.len() / 4 * 4;
        let rest = source.len() - whole;
        // After the end of a buffer there is padding, which may be overwritten.
        let at_end = slice.offset + slice.bytes == slice.buffer.bytes();
        if slice.offset.is_multiple_of(4) && (rest == 0 || at_end) {
            let at = slice.offset as u64;
            if whole > 0 {
                self.write_words(buffer, at, &source[..whole]);
            }
            if rest > 0 {
                let mut word = [0; 4];
                word[..rest].copy_from_slice(&source[whole..]);
                self.write_words(buffer, at + whole as u64, &word);
            }
            return Ok(());
        }
        let staged = transfer::words_of(&self.context, source)?;
        self.write_words(&staged.0, 0, &staged.1);
        transfer::copy_bytes(
            &self.context.clone(),
            self,
            (&staged.0, 0),
            (buffer, slice.offset),
            source.len(),
        )
    }
}

/// Maps a staging buffer once the device has filled it, and copies its content to the destination.
fn deliver(delivery: Delivery) -> Delivered {
    let delivered = Delivered::default();
    let note = delivered.clone();
    let Delivery { staging, skip, bytes, arrival, offset } = delivery;
    let buffer = staging.clone();
    staging.map_async(MapMode::Read, .., move |mapped| {
        // Mapping fails only if the device is lost, which the context reports.
        if mapped.is_ok() {
            if let Ok(view) = buffer.get_mapped_range(..)
                && let Some(source) = view.get(skip..skip + bytes)
            {
                arrival.write(offset, source);
            }
            buffer.unmap();
        }
        drop(arrival);
        note.store(true, Ordering::Release);
    });
    delivered
}

fn equal_lengths(source: usize, destination: usize) -> Result<()> {
    if source == destination {
        return Ok(());
    }
    let message = format!("is {destination} bytes, but the source is {source}");
    Err(Error::invalid(message).at("destination").field("bytes"))
}

impl Stream for WgpuStream {
    fn upload(&mut self, source: &[u8], destination: &BufferSlice) -> Result<()> {
        equal_lengths(source.len(), destination.bytes)?;
        let buffer = self.locate(destination, "destination")?;
        self.context.check()?;
        self.settle(&buffer)?;
        match &buffer.storage {
            Storage::Host(memory) => {
                memory.write(destination.offset, source);
                Ok(())
            }
            Storage::Device(memory) => self.write_device(source, memory, destination),
        }
    }

    fn download(
        &mut self,
        source: &BufferSlice,
        destination: &mut [u8],
        what: &str,
        timeout: Duration,
    ) -> Result<()> {
        equal_lengths(source.bytes, destination.len())?;
        let buffer = self.locate(source, "source")?;
        self.context.check()?;
        let Storage::Device(memory) = &buffer.storage else {
            self.finish(what, timeout)?;
            if let Storage::Host(memory) = &buffer.storage {
                destination.copy_from_slice(&memory.read(source.offset, source.bytes));
            }
            return Ok(());
        };
        if source.bytes == 0 {
            return self.finish(what, timeout);
        }
        let (staging, skip) = self.stage(memory, source.offset, source.bytes)?;
        self.submit();
        let failed = Arc::new(Mutex::new(None));
        let note = failed.clone();
        staging.map_async(MapMode::Read, .., move |mapped| {
            *note.lock().unwrap_or_else(PoisonError::into_inner) = Some(mapped.is_ok());
        });
        self.finish(what, timeout)?;
        let called = || failed.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        self.context.wait_until(called, what, timeout.min(LONGEST_TIMEOUT))?;
        let mapped = *failed.lock().unwrap_or_else(PoisonError::into_inner);
        if mapped != Some(true) {
            return Err(Error::internal(format!("{what}: the device did not map what was copied")));
        }
        let view = staging
            .get_mapped_range(..)
            .map_err(|error| Error::internal(format!("{what}: reading what was mapped: {error}")))?;
        let bytes = view.get(skip..skip + source.bytes);
        destination.copy_from_slice(bytes.ok_or_else(|| Error::internal("a staging buffer is too short"))?);
        Ok(())
    }

    fn copy(&mut self, source: &BufferSlice, destination: &BufferSlice) -> Result<()> {
        equal_lengths(source.bytes, destination.bytes)?;
        let (from, to) = (self.locate(source, "source")?, self.locate(destination, "destination")?);
        if source.overlaps(destination) {
            return Err(Error::invalid("overlaps the source").at("destination"));
        }
        self.context.check()?;
        if source.bytes == 0 {
            return Ok(());
        }
        match (&from.storage, &to.storage) {
            (Storage::Host(memory), _) => {
                self.settle(&from)?;
                let bytes = memory.read(source.offset, source.bytes);
                self.upload(&bytes, destination)
            }
            (Storage::Device(memory), Storage::Host(host)) => {
                let (staging, skip) = self.stage(memory, source.offset, source.bytes)?;
                let (arrival, offset) = (host.expect(), destination.offset);
                self.deliveries.push(Delivery { staging, skip, bytes: source.bytes, arrival, offset });
                Ok(())
            }
            (Storage::Device(from), Storage::Device(to)) => {
                let words =
                    [source.offset, destination.offset, source.bytes].iter().all(|at| at.is_multiple_of(4));
                // wgpu copies between different buffers only.
                if words && !Arc::ptr_eq(&source.buffer, &destination.buffer) {
                    let (offset, at) = (source.offset as u64, destination.offset as u64);
                    self.copy_words((from, offset), (to, at), source.bytes as u64);
                    return Ok(());
                }
                let (from, to) = ((from, source.offset), (to, destination.offset));
                transfer::copy_bytes(&self.context.clone(), self, from, to, source.bytes)
            }
        }
    }

    fn fill(&mut self, destination: &BufferSlice, byte: u8) -> Result<()> {
        let buffer = self.locate(destination, "destination")?;
        self.context.check()?;
        self.settle(&buffer)?;
        match &buffer.storage {
            Storage::Host(memory) => memory.fill(destination.offset, destination.bytes, byte),
            Storage::Device(memory) => {
                let words = destination.offset.is_multiple_of(4) && destination.bytes.is_multiple_of(4);
                if destination.bytes == 0 {
                    return Ok(());
                }
                if words && byte == 0 {
                    let (offset, bytes) = (destination.offset as u64, destination.bytes as u64);
                    self.encoder().clear_buffer(memory, offset, Some(bytes));
                    return Ok(());
                }
                let to = (memory, destination.offset);
                transfer::fill_bytes(&self.context.clone(), self, to, destination.bytes, byte)?;
            }
        }
        Ok(())
    }

    fn record(&mut self, event: &dyn Event) -> Result<()> {
        let event = WgpuEvent::own(event, &self.context)?;
        self.context.check()?;
        event.timestamp.write(&self.context.clone(), || self.encoder())?;
        self.submit();
        *event.lock() =
            Some(Recorded { submission: self.last.clone(), undelivered: self.undelivered.clone() });
        Ok(())
    }

    fn wait(&mut self, event: &dyn Event) -> Result<()> {
        // The event's work is already submitted, and the shared queue runs it before later submissions of this stream.
        WgpuEvent::own(event, &self.context).map(drop)
    }

    fn synchronize(&mut self, what: &str, timeout: Duration) -> Result<()> {
        self.finish(what, timeout)
    }
}

impl Drop for WgpuStream {
    fn drop(&mut self) {
        // Enqueued work must run even if nothing waits for it.
        self.submit();
    }
}

impl fmt::Debug for WgpuStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WgpuStream").field("dispatches", &self.dispatches).finish_non_exhaustive()
    }
}

/// What a stream had submitted when an event was recorded.
#[derive(Clone, Default)]
struct Recorded {
    /// The last submission, if there was any.
    submission: Option<SubmissionIndex>,
    undelivered: Vec<Delivered>,
}

/// An event: what a stream had submitted when it was recorded.
pub(crate) struct WgpuEvent {
    context: Arc<Context>,
    /// `None` if never recorded.
    recorded: Mutex<Option<Recorded>>,
    timestamp: Timestamp,
}

impl WgpuEvent {
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self { context, recorded: Mutex::new(None), timestamp: Timestamp::default() }
    }

    fn own<'a>(event: &'a dyn Event, context: &Arc<Context>) -> Result<&'a Self> {
        match (event as &dyn Any).downcast_ref::<Self>() {
            Some(own) if Arc::ptr_eq(&own.context, context) => Ok(own),
            Some(_) => Err(Error::invalid("belongs to another handle of the device").at("event")),
            None => Err(Error::invalid("belongs to another backend").at("event")),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Recorded>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recorded(&self) -> Recorded {
        self.lock().clone().unwrap_or_default()
    }
}

impl Event for WgpuEvent {
    fn reached(&self) -> Result<bool> {
        let recorded = self.recorded();
        let Some(submission) = recorded.submission else {
            self.context.check()?;
            return Ok(true);
        };
        match self.context.wait(&submission, "an event", Duration::ZERO) {
            Ok(()) => Ok(all_delivered(&recorded.undelivered)),
            Err(error) if error.code() == dsrun_core::Code::Timeout => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn synchronize(&self, what: &str, timeout: Duration) -> Result<()> {
        let (recorded, timeout) = (self.recorded(), timeout.min(LONGEST_TIMEOUT));
        match recorded.submission {
            Some(submission) => self.context.wait(&submission, what, timeout)?,
            None => self.context.check()?,
        }
        self.context.wait_until(|| all_delivered(&recorded.undelivered), what, timeout)
    }

    fn elapsed_since(&self, earlier: &dyn Event) -> Result<Option<Duration>> {
        let earlier = Self::own(earlier, &self.context)?;
        for event in [self, earlier] {
            if event.lock().is_none() {
                return Err(Error::invalid("was never recorded").at("event"));
            }
        }
        self.timestamp.since(&earlier.timestamp, &self.context)
    }
}

impl fmt::Debug for WgpuEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WgpuEvent").finish_non_exhaustive()
    }
}
