//! Page-locked host memory that the device reads and writes.
//!
//! The driver allocates with one thread, and another pass zeroes the memory. So memory of more than a few pages is mapped here,
//! zeroed by all cores, which is what the first write to a page does, and then registered with the driver.

use cudarc::driver::sys::{self, CUresult};
use dsrun_core::{Error, Result, host_memory};
use memmap2::MmapMut;
use rayon::prelude::*;
use std::{
    mem,
    ptr::{self, NonNull},
};

/// The smallest size that is mapped and registered. A registration has a cost of its own.
const MAPPED: usize = 1 << 20;

/// Mappings are multiples of this, which is a multiple of the page size of all systems.
const PAGES: usize = 1 << 16;

/// The smallest page size.
const SMALLEST_PAGE: usize = 1 << 12;

/// Bytes that a thread zeroes at a time: a few huge pages.
const PIECE: usize = 8 << 20;

/// Zeroed host memory, pinned and mapped into the address space of the device.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    host: NonNull<u8>,
    pointer: u64,
    /// The mapping that is registered; `None` if the driver allocated the memory.
    pages: Option<MmapMut>,
}

// SAFETY: the memory belongs to its owner, and is never touched through this type; whoever does keeps to
// `Buffer::host_pointer`.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Pins memory, at least one byte. A context must be current; `check` makes errors of its statuses, given the name of the
    /// operation.
    ///
    /// # Errors
    /// If the memory cannot be pinned.
    pub(crate) fn new(bytes: usize, check: impl Fn(CUresult, &str) -> Result<()>) -> Result<Self> {
        // What cannot be registered is left to the driver, whose error says why there is no memory.
        match zeroed_pages(bytes).and_then(Self::registered) {
            Some(memory) => Ok(memory),
            None => Self::allocated(bytes.max(1), check),
        }
    }

    /// The address for the host.
    pub(crate) fn host(&self) -> NonNull<u8> {
        self.host
    }

    /// The address for the device.
    pub(crate) fn pointer(&self) -> u64 {
        self.pointer
    }

    /// Registers pages; `None` if that is not possible. A context must be current.
    fn registered(mut pages: MmapMut) -> Option<Self> {
        let (host, bytes) = (NonNull::new(pages.as_mut_ptr())?, pages.len());
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the pages are mapped, and are unmapped only after they are unregistered.
        let status = unsafe { sys::cuMemHostRegister_v2(host.as_ptr().cast(), bytes, flags) };
        if status != CUresult::CUDA_SUCCESS {
            tracing::debug!(bytes, ?status, "host memory could not be registered");
            return None;
        }
        // From here on the drop unregisters them.
        let mut memory = Self { host, pointer: 0, pages: Some(pages) };
        match memory.map() {
            CUresult::CUDA_SUCCESS => Some(memory),
            status => {
                tracing::debug!(bytes, ?status, "registered host memory could not be mapped");
                None
            }
        }
    }

    /// Lets the driver allocate.
    fn allocated(bytes: usize, check: impl Fn(CUresult, &str) -> Result<()>) -> Result<Self> {
        let mut host = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the pointer is to a place of the right type.
        check(unsafe { sys::cuMemHostAlloc(&raw mut host, bytes, flags) }, "pinning host memory")?;
        let host =
            NonNull::new(host.cast::<u8>()).ok_or_else(|| Error::internal("pinned memory is at null"))?;
        // From here on the drop frees it.
        let mut memory = Self { host, pointer: 0, pages: None };
        // SAFETY: the memory was just allocated and is `bytes` long.
        unsafe { ptr::write_bytes(host.as_ptr(), 0, bytes) };
        check(memory.map(), "mapping pinned memory")?;
        Ok(memory)
    }

    /// Finds the address for the device.
    fn map(&mut self) -> CUresult {
        // SAFETY: the pointer is to a place of the right type; the memory is pinned.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut self.pointer, self.host.as_ptr().cast(), 0) }
    }
}

impl Drop for PinnedMemory {
    /// The owner has made sure that all work with the memory is done and that a context is current.
    fn drop(&mut self) {
        let host = self.host.as_ptr().cast();
        let Some(pages) = self.pages.take() else {
            // SAFETY: allocated by `allocated`, and freed once.
            unsafe { sys::cuMemFreeHost(host) };
            return;
        };
        // SAFETY: registered by `registered`, and unregistered once.
        let status = unsafe { sys::cuMemHostUnregister(host) };
        if status != CUresult::CUDA_SUCCESS {
            // The device may still have access to the pages, so they must not become another mapping.
            mem::forget(pages);
        }
    }
}

/// Zeroed pages of at least this size, each in memory already; `None` if the size is small or more than the system has free. Then
/// the driver refuses the memory, where the first write to pages would end the process.
fn zeroed_pages(bytes: usize) -> Option<MmapMut> {
    if bytes < MAPPED || bytes as u64 > host_memory::available()? {
        return None;
    }
    let mut pages = MmapMut::map_anon(bytes.checked_next_multiple_of(PAGES)?).ok()?;
    // Fewer pages to zero and to pin. Systems without huge pages refuse.
    #[cfg(target_os = "linux")]
    let _ = pages.advise(memmap2::Advice::HugePage);
    pages.par_chunks_mut(PIECE).for_each(|piece| {
        piece.iter_mut().step_by(SMALLEST_PAGE).for_each(|byte| *byte = 0);
    });
    Some(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_zero_and_whole() {
        let Some(pages) = zeroed_pages(MAPPED + 1) else {
            assert!(host_memory::available().is_none_or(|bytes| bytes <= MAPPED as u64), "there is memory");
            return;
        };
        assert_eq!(pages.len(), MAPPED + PAGES);
        assert_eq!(pages.as_ptr().align_offset(SMALLEST_PAGE), 0);
        assert!(pages.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn small_and_impossible_sizes_are_left_to_the_driver() {
        for bytes in [0, 1, MAPPED - 1, usize::MAX - PAGES / 2, usize::MAX] {
            assert!(zeroed_pages(bytes).is_none(), "{bytes}");
        }
    }
}
