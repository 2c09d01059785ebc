//! Packed weights.

use dsrun_core::{
    WeightType,
    device::{BufferSlice, MemoryReservation},
    kernels::PackedWeight,
};

/// A packed weight, counted in its device's account.
#[derive(Debug)]
pub(crate) struct HostWeight<W> {
    packed: W,
    /// The memory of an adopted weight, which is counted as that of its buffer.
    memory: Option<BufferSlice>,
    _reservation: Option<MemoryReservation>,
}

impl<W> HostWeight<W> {
    /// A weight in memory of its own.
    pub(crate) fn own(packed: W, reservation: MemoryReservation) -> Self {
        Self { packed, memory: None, _reservation: Some(reservation) }
    }

    /// A weight in a buffer of its device.
    pub(crate) fn adopted(packed: W, memory: BufferSlice) -> Self {
        Self { packed, memory: Some(memory), _reservation: None }
    }

    pub(crate) fn packed(&self) -> &W {
        &self.packed
    }

    /// Whether the weight is in a buffer, in a range that this slice overlaps.
    pub(crate) fn overlaps(&self, slice: &BufferSlice) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.overlaps(slice))
    }
}

impl<W: PackedWeight> PackedWeight for HostWeight<W> {
    fn weight_type(&self) -> &WeightType {
        self.packed.weight_type()
    }

    fn bytes(&self) -> usize {
        self.packed.bytes()
    }
}
