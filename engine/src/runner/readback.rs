//! How tokens reach the host while the device works on.
//!
//! Behind each step its results are copied into pinned memory of the host, in order with the other work, and an event marks
//! the point. The host reads them when it gets round to it, usually when the next step is already under way.

use crate::error::Result;
use dsrun_core::{
    Error,
    device::{BufferSlice, Device, Event, MemoryKind, Stream},
};
use std::{sync::Arc, time::Duration};

/// Steps whose results may be on their way: the one that is read next, and the one behind it.
pub(crate) const IN_FLIGHT: usize = 2;

/// A token that was sampled, as the device gives it: -1 is none. With it the logarithm of its probability.
pub(crate) type Sampled = (i32, f32);

/// Pinned memory for the results of the steps in flight.
#[derive(Debug)]
pub(crate) struct Handover {
    slots: Vec<Slot>,
    next: usize,
    /// Bytes of a slot for ids, and for logarithms.
    half: usize,
}

#[derive(Debug)]
struct Slot {
    memory: BufferSlice,
    /// Rows of logits, where some are wanted; grows as they are.
    logits: Option<BufferSlice>,
    event: Arc<dyn Event>,
}

/// Rows of a step's logits that the host wants to see.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogitRows<'a> {
    /// All of the step's.
    pub(crate) logits: &'a BufferSlice,
    /// Bytes of a row.
    pub(crate) row_bytes: usize,
    /// Those that are wanted.
    pub(crate) rows: &'a [usize],
}

/// The results of a step on their way. To be taken before [`IN_FLIGHT`] more are sent, or not at all.
#[derive(Debug)]
pub(crate) struct Parcel {
    slot: usize,
    count: usize,
    /// Where logarithms begin in the slot, behind the ids, in bytes.
    apart: usize,
}

/// Bytes of an id and of a logarithm of a probability.
const ELEMENT: usize = 4;

impl Parcel {
    /// Where its results go.
    pub(crate) fn slot(&self) -> usize {
        self.slot
    }
}

impl Handover {
    /// For steps that sample up to `rows` tokens.
    pub(crate) fn new(device: &dyn Device, rows: usize) -> Result<Self> {
        // As results of steps are placed.
        let half = (ELEMENT * rows.max(1)).next_multiple_of(device.properties().alignment.max(ELEMENT));
        let slot = |_| {
            let memory = device.allocate(2 * half, MemoryKind::Pinned)?;
            Ok(Slot { memory: BufferSlice::whole(memory), logits: None, event: device.event()? })
        };
        let slots = (0..IN_FLIGHT).map(slot).collect::<Result<_>>()?;
        Ok(Self { slots, next: 0, half })
    }

    /// Where the results of the next step go, from 0 to [`IN_FLIGHT`].
    pub(crate) fn next_slot(&self) -> usize {
        self.next
    }

    /// Sends the first `count` elements of a step's results and some rows of its logits, once everything enqueued so far is done.
    pub(crate) fn send(
        &mut self,
        device: &dyn Device,
        stream: &mut dyn Stream,
        [ids, log_probabilities]: [&BufferSlice; 2],
        count: usize,
        logits: LogitRows<'_>,
    ) -> Result<Parcel> {
        let slot = self.next;
        self.next = (slot + 1) % IN_FLIGHT;
        let Slot { memory, logits: pinned, event } = &mut self.slots[slot];
        let bytes = count * ELEMENT;
        let mut apart = self.half;
        if bytes > 0 {
            // Mostly one stands just behind the other, and both are one copy.
            let near = log_probabilities.offset.checked_sub(ids.offset).filter(|near| {
                let same = Arc::ptr_eq(&ids.buffer, &log_probabilities.buffer);
                same && (bytes..=self.half).contains(near)
            });
            if let Some(near) = near {
                apart = near;
                let both = BufferSlice::new(ids.buffer.clone(), ids.offset, near + bytes)?;
                stream.copy(&both, &memory.slice(0, both.bytes)?)?;
            } else {
                stream.copy(&ids.slice(0, bytes)?, &memory.slice(0, bytes)?)?;
                stream.copy(&log_probabilities.slice(0, bytes)?, &memory.slice(apart, bytes)?)?;
            }
        }
        let LogitRows { logits: all, row_bytes, rows } = logits;
        if !rows.is_empty() {
            let needed = rows.len() * row_bytes;
            let large = pinned.take().filter(|pinned| pinned.bytes >= needed);
            let room = rows.len().next_power_of_two() * row_bytes;
            let memory = match large {
                Some(memory) => memory,
                None => BufferSlice::whole(device.allocate(room, MemoryKind::Pinned)?),
            };
            for (place, row) in rows.iter().enumerate() {
                let source = all.slice(row * row_bytes, row_bytes)?;
                stream.copy(&source, &memory.slice(place * row_bytes, row_bytes)?)?;
            }
            *pinned = Some(memory);
        }
        stream.record(&**event)?;
        Ok(Parcel { slot, count, apart })
    }

    /// Whether a step's results are there.
    pub(crate) fn arrived(&self, parcel: &Parcel) -> Result<bool> {
        Ok(self.slots[parcel.slot].event.reached()?)
    }

    /// Waits for a step's results.
    pub(crate) fn receive(
        &self,
        parcel: &Parcel,
        stream: &mut dyn Stream,
        timeout: Duration,
    ) -> Result<Vec<Sampled>> {
        let Slot { memory, event, .. } = &self.slots[parcel.slot];
        event.synchronize("the tokens of a step", timeout)?;
        let bytes = read(&memory.slice(0, parcel.apart + ELEMENT * parcel.count)?, stream, timeout)?;
        let (ids, log_probabilities) = bytes.split_at_checked(parcel.apart).ok_or_else(too_short)?;
        let [(ids, _), (log_probabilities, _)] = [ids, log_probabilities].map(<[u8]>::as_chunks::<ELEMENT>);
        let pairs = ids.iter().zip(log_probabilities).take(parcel.count);
        Ok(pairs.map(|(id, log)| (i32::from_le_bytes(*id), f32::from_le_bytes(*log))).collect())
    }

    /// A row of logits that was sent along, by its place among those that were wanted. Only after [`Self::receive`].
    pub(crate) fn logits(
        &self,
        parcel: &Parcel,
        place: usize,
        row_bytes: usize,
        stream: &mut dyn Stream,
        timeout: Duration,
    ) -> Result<Vec<f32>> {
        let memory = self.slots[parcel.slot].logits.as_ref().ok_or_else(too_short)?;
        let bytes = read(&memory.slice(place * row_bytes, row_bytes)?, stream, timeout)?;
        Ok(bytes.as_chunks::<ELEMENT>().0.iter().map(|element| f32::from_le_bytes(*element)).collect())
    }
}

/// Reads pinned memory that no work under way writes to: the event behind the copies into it was reached, and the next into
/// the same slot are not enqueued before [`Handover::send`] is called again.
pub(crate) fn read(memory: &BufferSlice, stream: &mut dyn Stream, timeout: Duration) -> Result<Vec<u8>> {
    let mut bytes = vec![0; memory.bytes];
    match memory.buffer.host_pointer() {
        // SAFETY: a slice lies inside its buffer, which lives as long as it, and nothing writes to it, as said above.
        Some(pointer) => unsafe {
            let source = pointer.as_ptr().add(memory.offset);
            std::ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), bytes.len());
        },
        // A device whose pinned memory the host cannot reach: this waits for all work, later steps included.
        None => stream.download(memory, &mut bytes, "the tokens of a step", timeout)?,
    }
    Ok(bytes)
}

fn too_short() -> Error {
    Error::internal("the results of a step are shorter than they should be")
}
