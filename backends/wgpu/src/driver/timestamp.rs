//! Device timestamps, written by command buffers.

use super::context::Context;
use dsrun_core::{Error, Result};
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use wgpu::{
    BufferDescriptor, BufferUsages, CommandEncoder, CommandEncoderDescriptor, MapMode, QuerySet,
    QuerySetDescriptor, QueryType,
};

/// The distance in bytes between resolved timestamps: the alignment of query resolve offsets.
const STEP: u64 = 256;

/// The longest wait for two timestamps to be read.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The timestamp of an event.
///
/// A timestamp may need a separate submission. So an event takes timestamps only after its time was requested once: events that
/// are never measured cost nothing.
#[derive(Debug, Default)]
pub(super) struct Timestamp {
    wanted: AtomicBool,
    /// The query of the last record; `None` if no timestamp was needed then.
    query: Mutex<Option<QuerySet>>,
}

impl Timestamp {
    /// Writes a timestamp, if one is needed and the device supports them. `encoder` returns the command buffer.
    ///
    /// # Errors
    /// Those of making a query.
    pub(super) fn write<'a>(
        &self,
        context: &Context,
        encoder: impl FnOnce() -> &'a mut CommandEncoder,
    ) -> Result<()> {
        if !context.spec.timestamps || !self.wanted.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut query = self.query.lock().unwrap_or_else(PoisonError::into_inner);
        let set = match &mut *query {
            Some(set) => set,
            None => {
                let descriptor = QuerySetDescriptor { label: None, ty: QueryType::Timestamp, count: 1 };
                let made =
                    context.scoped("making a query", || context.device.create_query_set(&descriptor))?;
                query.insert(made)
            }
        };
        encoder().write_timestamp(set, 0);
        Ok(())
    }

    /// The time from `earlier` to this timestamp; `None` if not both were taken. Both events were reached.
    ///
    /// # Errors
    /// [`dsrun_core::Code::Timeout`], or the fault of the device.
    pub(super) fn since(&self, earlier: &Self, context: &Context) -> Result<Option<Duration>> {
        let query = |timestamp: &Self| {
            timestamp.wanted.store(true, Ordering::Relaxed);
            timestamp.query.lock().unwrap_or_else(PoisonError::into_inner).clone()
        };
        let (Some(start), Some(end)) = (query(earlier), query(self)) else { return Ok(None) };
        let buffer = |usage| {
            let descriptor =
                BufferDescriptor { label: None, size: 2 * STEP, usage, mapped_at_creation: false };
            context.scoped("allocating timestamps", || context.device.create_buffer(&descriptor))
        };
        let resolved = buffer(BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC)?;
        let staging = buffer(BufferUsages::COPY_DST | BufferUsages::MAP_READ)?;
        let submission = context.scoped("reading timestamps", || {
            let mut encoder = context.device.create_command_encoder(&CommandEncoderDescriptor::default());
            for (set, offset) in [(&start, 0), (&end, STEP)] {
                encoder.resolve_query_set(set, 0..1, &resolved, offset);
            }
            encoder.copy_buffer_to_buffer(&resolved, 0, &staging, 0, 2 * STEP);
            context.queue.submit([encoder.finish()])
        })?;
        let mapped = Arc::new(AtomicBool::new(false));
        let note = mapped.clone();
        staging.map_async(MapMode::Read, .., move |_| note.store(true, Ordering::Release));
        context.wait(&submission, "timestamps", TIMEOUT)?;
        context.wait_until(|| mapped.load(Ordering::Acquire), "timestamps", TIMEOUT)?;
        let view = staging
            .get_mapped_range(..)
            .map_err(|error| Error::internal(format!("reading timestamps: {error}")))?;
        let ticks = |offset: u64| {
            let bytes = view.get(offset as usize..).and_then(|bytes| bytes.first_chunk::<8>());
            bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
        };
        let ticks = ticks(STEP).saturating_sub(ticks(0));
        let nanoseconds = ticks as f64 * f64::from(context.queue.get_timestamp_period());
        Ok(Some(Duration::from_nanos(nanoseconds as u64)))
    }
}
