//! Reads sampled tokens back while the device continues.
//!
//! After each step its results are copied to pinned host memory on the same stream, and an event is recorded after the copy. The
//! host reads them later, usually while the next step runs.

use crate::error::Result;
use dsrun_core::{
    Error,
    device::{BufferSlice, Device, Event, MemoryKind, Stream},
};
use std::{borrow::Cow, slice, sync::Arc, time::Duration};

/// A sampled token as the device returns it (-1 for no token), with the logarithm of its probability.
pub(crate) type SampledToken = (i32, f32);

/// Pinned memory for the results of the steps in flight.
#[derive(Debug)]
pub(crate) struct Readback {
    slots: Vec<Slot>,
    next: usize,
    /// Bytes of a slot for token ids, and as many for log probabilities.
    half: usize,
}

#[derive(Debug)]
struct Slot {
    memory: BufferSlice,
    /// Memory for rows of logits, if some were requested; grows with demand.
    logits: Option<BufferSlice>,
    event: Arc<dyn Event>,
}

/// Rows of a step's logits that are sent to the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogitRows<'a> {
    /// All rows of the step.
    pub(crate) logits: &'a BufferSlice,
    /// Bytes of a row.
    pub(crate) row_bytes: usize,
    /// The rows to send.
    pub(crate) rows: &'a [usize],
}

/// The sampled tokens of a step, and rows of its logits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampledRows<'a> {
    /// The tokens.
    pub(crate) ids: &'a BufferSlice,
    /// The logarithms of their probabilities.
    pub(crate) log_probabilities: &'a BufferSlice,
    /// The number of tokens.
    pub(crate) count: usize,
    /// Rows of logits that are copied with them.
    pub(crate) logits: LogitRows<'a>,
}

/// The results of a step that are being copied to the host. Slots are reused in a ring, so they must be received
/// before the step `depth` steps later is sent, or not at all.
#[derive(Debug)]
pub(crate) struct PendingReadback {
    slot: usize,
    count: usize,
    /// The offset of the log probabilities in the slot, after the ids, in bytes.
    log_offset: usize,
}

/// Bytes of a token id and of a log probability.
const ELEMENT: usize = 4;

impl PendingReadback {
    /// The slot that its results go to.
    pub(crate) fn slot(&self) -> usize {
        self.slot
    }
}

impl Readback {
    /// Pinned memory for `depth` steps in flight that sample up to `rows` tokens each.
    ///
    /// # Errors
    /// If there is too little memory.
    pub(crate) fn new(device: &dyn Device, rows: usize, depth: usize) -> Result<Self> {
        // Aligned like results in the arena, so that a single copy can include both.
        let half = (ELEMENT * rows.max(1)).next_multiple_of(device.properties().alignment.max(ELEMENT));
        let slot = |_| {
            let memory = device.allocate(2 * half, MemoryKind::Pinned)?;
            Ok(Slot { memory: BufferSlice::whole(memory), logits: None, event: device.event()? })
        };
        let slots = (0..depth.max(1)).map(slot).collect::<Result<_>>()?;
        Ok(Self { slots, next: 0, half })
    }

    /// The slot that the results of the next step go to, below the number of slots.
    pub(crate) fn next_slot(&self) -> usize {
        self.next
    }

    /// Enqueues the copies of a step's results to the host; `None` if the step does not sample.
    ///
    /// # Errors
    /// If the device failed, or there is too little memory.
    pub(crate) fn send(
        &mut self,
        device: &dyn Device,
        stream: &mut dyn Stream,
        sampled: Option<SampledRows<'_>>,
    ) -> Result<PendingReadback> {
        let slot = self.next;
        self.next = (slot + 1) % self.slots.len();
        let Slot { memory, logits: pinned, event } = &mut self.slots[slot];
        let Some(SampledRows { ids, log_probabilities, count, logits }) = sampled else {
            stream.record(&**event)?;
            return Ok(PendingReadback { slot, count: 0, log_offset: self.half });
        };
        let bytes = count * ELEMENT;
        let mut log_offset = self.half;
        if bytes > 0 {
            // The log probabilities usually follow right after the ids, so one copy includes both.
            let distance = log_probabilities.offset.checked_sub(ids.offset).filter(|distance| {
                let same = Arc::ptr_eq(&ids.buffer, &log_probabilities.buffer);
                same && (bytes..=self.half).contains(distance)
            });
            if let Some(distance) = distance {
                log_offset = distance;
                let both = BufferSlice::new(ids.buffer.clone(), ids.offset, distance + bytes)?;
                stream.copy(&both, &memory.slice(0, both.bytes)?)?;
            } else {
                stream.copy(&ids.slice(0, bytes)?, &memory.slice(0, bytes)?)?;
                stream.copy(&log_probabilities.slice(0, bytes)?, &memory.slice(log_offset, bytes)?)?;
            }
        }
        let LogitRows { logits: all, row_bytes, rows } = logits;
        if !rows.is_empty() {
            let needed = rows.len() * row_bytes;
            let large_enough = pinned.take().filter(|pinned| pinned.bytes >= needed);
            let bytes = rows.len().next_power_of_two() * row_bytes;
            let memory = match large_enough {
                Some(memory) => memory,
                None => BufferSlice::whole(device.allocate(bytes, MemoryKind::Pinned)?),
            };
            for (place, row) in rows.iter().enumerate() {
                let source = all.slice(row * row_bytes, row_bytes)?;
                stream.copy(&source, &memory.slice(place * row_bytes, row_bytes)?)?;
            }
            *pinned = Some(memory);
        }
        stream.record(&**event)?;
        Ok(PendingReadback { slot, count, log_offset })
    }

    /// Whether the results of a step have arrived.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn is_complete(&self, pending: &PendingReadback) -> Result<bool> {
        Ok(self.slots[pending.slot].event.reached()?)
    }

    /// Waits for the results of a step.
    ///
    /// # Errors
    /// If the device failed, or the results do not arrive in time.
    pub(crate) fn receive(
        &self,
        pending: &PendingReadback,
        stream: &mut dyn Stream,
        timeout: Duration,
    ) -> Result<Vec<SampledToken>> {
        let Slot { memory, event, .. } = &self.slots[pending.slot];
        event.synchronize("the tokens of a step", timeout)?;
        let memory = memory.slice(0, pending.log_offset + ELEMENT * pending.count)?;
        let bytes = read_pinned(&memory, stream, timeout)?;
        let (ids, log_probabilities) = bytes.split_at_checked(pending.log_offset).ok_or_else(too_short)?;
        let [(ids, _), (log_probabilities, _)] = [ids, log_probabilities].map(<[u8]>::as_chunks::<ELEMENT>);
        let pairs = ids.iter().zip(log_probabilities).take(pending.count);
        Ok(pairs.map(|(id, log)| (i32::from_le_bytes(*id), f32::from_le_bytes(*log))).collect())
    }

    /// A row of logits that was copied with the results, by its index in [`LogitRows::rows`]. Only valid after [`Self::receive`].
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn logits(
        &self,
        pending: &PendingReadback,
        place: usize,
        row_bytes: usize,
        stream: &mut dyn Stream,
        timeout: Duration,
    ) -> Result<Vec<f32>> {
        let memory = self.slots[pending.slot].logits.as_ref().ok_or_else(too_short)?;
        let row = memory.slice(place * row_bytes, row_bytes)?;
        let bytes = read_pinned(&row, stream, timeout)?;
        Ok(bytes.as_chunks::<ELEMENT>().0.iter().map(|element| f32::from_le_bytes(*element)).collect())
    }
}

/// The bytes of pinned memory that no work in flight writes to: the event after the copies into it was reached, and the next copies
/// into the same slot are not enqueued before [`Readback::send`] is called again. They are copied only from a device whose pinned
/// memory the host cannot access.
///
/// # Errors
/// If the device failed.
pub(crate) fn read_pinned<'memory>(
    memory: &'memory BufferSlice,
    stream: &mut dyn Stream,
    timeout: Duration,
) -> Result<Cow<'memory, [u8]>> {
    match memory.buffer.host_pointer() {
        // SAFETY: a slice lies inside its buffer and keeps it alive, and no work in flight writes to it, as said above.
        Some(pointer) => unsafe {
            let start = pointer.as_ptr().add(memory.offset);
            Ok(Cow::Borrowed(slice::from_raw_parts(start, memory.bytes)))
        },
        // This waits for all work, later steps included.
        None => {
            let mut bytes = vec![0; memory.bytes];
            stream.download(memory, &mut bytes, "the tokens of a step", timeout)?;
            Ok(Cow::Owned(bytes))
        }
    }
}

fn too_short() -> Error {
    Error::internal("the results of a step are shorter than its rows")
}
