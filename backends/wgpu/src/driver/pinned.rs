//! Pinned memory: host memory that streams can copy from and to.
//!
//! WebGPU has no memory that stays mapped while the device uses it. Pinned memory is therefore plain host memory. A copy into
//! it goes through a staging buffer, which is mapped and copied by the first wait or poll that finds the submission done.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The alignment of host memory, at least that of any adapter.
const ALIGNMENT: usize = 4096;

/// A block of host memory, zeroed when allocated.
#[derive(Debug)]
pub(crate) struct HostMemory {
    pointer: NonNull<u8>,
    layout: Layout,
    bytes: usize,
    /// The number of copies into this memory that are in flight.
    arriving: AtomicUsize,
}

// SAFETY: the memory belongs to this value alone and is freed with it. Its bytes are read and written through raw pointers only,
// by code that holds to the contract of `Buffer::host_pointer`: accesses do not race with work on streams.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Zeroed memory; `None` if there is not enough.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()?;
        // SAFETY: the layout is not empty.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { pointer, layout, bytes, arriving: AtomicUsize::new(0) })
    }

    /// The address of the first byte.
    pub(crate) fn pointer(&self) -> NonNull<u8> {
        self.pointer
    }

    /// Whether any copy into this memory is in flight.
    pub(crate) fn is_arriving(&self) -> bool {
        self.arriving.load(Ordering::Acquire) > 0
    }

    /// Registers a copy into this memory, which is in flight until the arrival is dropped.
    pub(crate) fn expect(self: &Arc<Self>) -> Arrival {
        self.arriving.fetch_add(1, Ordering::AcqRel);
        Arrival(self.clone())
    }

    /// Writes bytes at an offset.
    pub(crate) fn write(&self, offset: usize, source: &[u8]) {
        assert!(
            offset.checked_add(source.len()).is_some_and(|end| end <= self.bytes),
            "a write outside of memory"
        );
        // SAFETY: the range was just checked; `copy` allows that the source is part of it; nothing races with work on streams.
        unsafe { std::ptr::copy(source.as_ptr(), self.pointer.as_ptr().add(offset), source.len()) }
    }

    /// Sets `count` bytes at an offset.
    pub(crate) fn fill(&self, offset: usize, count: usize, byte: u8) {
        assert!(offset.checked_add(count).is_some_and(|end| end <= self.bytes), "a fill outside of memory");
        // SAFETY: the range was just checked; nothing races with work on streams.
        unsafe { std::ptr::write_bytes(self.pointer.as_ptr().add(offset), byte, count) }
    }

    /// A copy of `count` bytes at an offset.
    pub(crate) fn read(&self, offset: usize, count: usize) -> Vec<u8> {
        assert!(offset.checked_add(count).is_some_and(|end| end <= self.bytes), "a read outside of memory");
        let mut bytes = vec![0; count];
        // SAFETY: the range was just checked; nothing races with work on streams.
        unsafe {
            std::ptr::copy_nonoverlapping(self.pointer.as_ptr().add(offset), bytes.as_mut_ptr(), count)
        };
        bytes
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: the pointer was allocated with this layout and is freed once.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) }
    }
}

/// A copy into host memory that is in flight.
#[derive(Debug)]
pub(crate) struct Arrival(Arc<HostMemory>);

impl Arrival {
    /// Writes the copied bytes.
    pub(crate) fn write(&self, offset: usize, source: &[u8]) {
        self.0.write(offset, source);
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.0.arriving.fetch_sub(1, Ordering::AcqRel);
    }
}
