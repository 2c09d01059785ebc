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
    rows: usize,
}

#[derive(Debug)]
struct Slot {
    memory: BufferSlice,
    event: Arc<dyn Event>,
}

/// The results of a step on their way. To be taken before [`IN_FLIGHT`] more are sent, or not at all.
#[derive(Debug)]
pub(crate) struct Parcel {
    slot: usize,
    count: usize,
}

/// Bytes of an id and of a logarithm of a probability.
const ELEMENT: usize = 4;

impl Handover {
    /// For steps that sample up to `rows` tokens.
    pub(crate) fn new(device: &dyn Device, rows: usize) -> Result<Self> {
        let slot = |_| {
            let memory = device.allocate(2 * ELEMENT * rows.max(1), MemoryKind::Pinned)?;
            Ok(Slot { memory: BufferSlice::whole(memory), event: device.event()? })
        };
        let slots = (0..IN_FLIGHT).map(slot).collect::<Result<_>>()?;
        Ok(Self { slots, next: 0, rows })
    }

    /// Sends the first `count` elements of a step's results, once everything enqueued so far is done.
    pub(crate) fn send(
        &mut self,
        stream: &mut dyn Stream,
        [ids, log_probabilities]: [&BufferSlice; 2],
        count: usize,
    ) -> Result<Parcel> {
        let slot = self.next;
        self.next = (slot + 1) % IN_FLIGHT;
        let Slot { memory, event } = &self.slots[slot];
        let bytes = count * ELEMENT;
        if bytes > 0 {
            stream.copy(&ids.slice(0, bytes)?, &memory.slice(0, bytes)?)?;
            let behind = memory.slice(self.rows * ELEMENT, bytes)?;
            stream.copy(&log_probabilities.slice(0, bytes)?, &behind)?;
        }
        stream.record(&**event)?;
        Ok(Parcel { slot, count })
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
        let Slot { memory, event } = &self.slots[parcel.slot];
        event.synchronize("the tokens of a step", timeout)?;
        let mut bytes = vec![0; 2 * ELEMENT * self.rows];
        match memory.buffer.host_pointer() {
            Some(pointer) if memory.bytes >= bytes.len() => {
                // SAFETY: the memory is at least as long as `bytes` and lives as long as `memory`. The copies into it are
                // done, since the event behind them was reached, and the next into this slot are not enqueued before
                // `send` is called again, for which `self` must not be borrowed.
                unsafe {
                    std::ptr::copy_nonoverlapping(pointer.as_ptr(), bytes.as_mut_ptr(), bytes.len());
                }
            }
            // A device whose pinned memory the host cannot reach: this waits for all work, later steps included.
            _ => {
                let memory = memory.slice(0, bytes.len())?;
                stream.download(&memory, &mut bytes, "the tokens of a step", timeout)?;
            }
        }
        let (elements, _) = bytes.as_chunks::<ELEMENT>();
        let (ids, log_probabilities) = elements.split_at_checked(self.rows).ok_or_else(too_short)?;
        let pairs = ids.iter().zip(log_probabilities).take(parcel.count);
        Ok(pairs.map(|(id, log)| (i32::from_le_bytes(*id), f32::from_le_bytes(*log))).collect())
    }
}

fn too_short() -> Error {
    Error::internal("the results of a step are shorter than they should be")
}
