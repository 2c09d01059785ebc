//! Buffers in host memory.

use crate::host::Host;
use dsrun_core::{
    Code, Error, Result,
    device::{Buffer, BufferSlice, MemoryAccount, MemoryKind, MemoryReservation},
};
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    fmt,
    ptr::NonNull,
    sync::Arc,
};

/// Buffers start at multiples of this, which is a cache line and the widest vector register.
pub(crate) const ALIGNMENT: usize = 64;

/// Reserves host memory.
///
/// # Errors
/// [`Code::OutOfMemory`] if the limit of the account would be exceeded.
pub(crate) fn reserve(account: &Arc<MemoryAccount>, bytes: usize) -> Result<MemoryReservation> {
    account.reserve(bytes).ok_or_else(|| exhausted(account, bytes))
}

fn exhausted(account: &MemoryAccount, bytes: usize) -> Error {
    let free =
        account.free().map_or_else(|| "an unknown amount is".to_owned(), |free| format!("{free} bytes are"));
    let message = format!(
        "{bytes} bytes of host memory wanted, {free} free and {} in use; use a smaller model or batch, or raise \
         the memory limit",
        account.used()
    );
    Error::new(Code::OutOfMemory, message)
}

/// A block of host memory, zeroed when allocated.
///
/// Its bytes are reached through a raw pointer only, while the device's lock is held: see `view`.
pub(crate) struct HostBuffer {
    /// The allocation; `None` for a buffer of no bytes.
    allocation: Option<(NonNull<u8>, Layout)>,
    /// The first byte, aligned.
    pointer: NonNull<u8>,
    bytes: usize,
    kind: MemoryKind,
    device: Arc<Host>,
    _reservation: MemoryReservation,
}

// SAFETY: the memory belongs to the buffer alone and is freed with it. The buffer itself never touches the bytes; code that
// does holds the lock of `device`, or is bound by the contract of `Buffer::host_pointer`.
unsafe impl Send for HostBuffer {}
// SAFETY: as above; all methods that take `&self` only read fields that never change.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    pub(crate) fn new(device: Arc<Host>, bytes: usize, kind: MemoryKind) -> Result<Self> {
        let account = match kind {
            MemoryKind::Device => &device.account,
            MemoryKind::Pinned => &device.pinned,
        };
        let reservation = reserve(account, bytes)?;
        if bytes == 0 {
            let pointer = NonNull::<AlignedByte>::dangling().cast();
            return Ok(Self { allocation: None, pointer, bytes, kind, device, _reservation: reservation });
        }
        let exhausted = || exhausted(account, bytes);
        // The allocator returns lazily zeroed pages only for its natural alignment, so this allocates a little more and
        // aligns the start itself, instead of zeroing gigabytes in advance.
        let layout = bytes.checked_add(ALIGNMENT).and_then(|bytes| Layout::from_size_align(bytes, 16).ok());
        let layout = layout.ok_or_else(exhausted)?;
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(exhausted)?;
        let offset = start.align_offset(ALIGNMENT);
        // SAFETY: `offset` is below `ALIGNMENT`, by which the allocation is longer than `bytes`.
        let pointer = unsafe { start.add(offset) };
        Ok(Self {
            allocation: Some((start, layout)),
            pointer,
            bytes,
            kind,
            device,
            _reservation: reservation,
        })
    }

    /// A pointer to the first byte. Reading or writing there requires the lock of [`Self::device`].
    pub(crate) fn pointer(&self) -> NonNull<u8> {
        self.pointer
    }

    /// The device handle that allocated the buffer.
    pub(crate) fn device(&self) -> &Arc<Host> {
        &self.device
    }
}

/// Device memory that holds the packed bytes of a weight. It starts at a multiple of 64 bytes.
#[derive(Debug)]
pub struct PackedMemory {
    pointer: NonNull<u8>,
    bytes: usize,
    _buffer: Arc<HostBuffer>,
}

// SAFETY: it points into a buffer that it keeps alive and that may be used from any thread; its bytes are read under the contract of
// `bytes` only.
unsafe impl Send for PackedMemory {}
// SAFETY: as above.
unsafe impl Sync for PackedMemory {}

impl PackedMemory {
    /// The memory of a range of a buffer of this device handle.
    ///
    /// # Errors
    /// If the range is not in such a buffer.
    pub(crate) fn new(range: &BufferSlice, host: &Arc<Host>) -> Result<Self> {
        let (buffer, pointer) = locate(range, host).map_err(|error| error.at("memory"))?;
        Ok(Self { pointer, bytes: range.bytes, _buffer: buffer })
    }

    /// The bytes.
    ///
    /// # Safety
    /// The lock of the device is held as long as they are used: as it is in [`crate::Compute::run`] and
    /// [`crate::Compute::image`].
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the range lies in a live buffer, whose memory was zeroed when it was allocated, and by the caller's promise
        // nothing writes to it meanwhile.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.bytes) }
    }
}

/// A byte with the alignment of the dangling pointers of empty buffers.
#[repr(align(64))]
struct AlignedByte;

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if let Some((start, layout)) = self.allocation {
            // SAFETY: `start` was allocated with `layout` and is freed once.
            unsafe { dealloc(start.as_ptr(), layout) };
        }
    }
}

impl Buffer for HostBuffer {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }

    fn host_pointer(&self) -> Option<NonNull<u8>> {
        Some(self.pointer)
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBuffer")
            .field("bytes", &self.bytes)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

/// The buffer of a slice and the address where the slice starts, if the slice lies in a buffer of the device handle `host`.
pub(crate) fn locate(slice: &BufferSlice, host: &Arc<Host>) -> Result<(Arc<HostBuffer>, NonNull<u8>)> {
    let buffer = slice.own_buffer(|buffer: &HostBuffer| Arc::ptr_eq(buffer.device(), host))?;
    // SAFETY: the offset was just found to be inside the buffer, or at its end.
    let pointer = unsafe { buffer.pointer().add(slice.offset) };
    Ok((buffer, pointer))
}
