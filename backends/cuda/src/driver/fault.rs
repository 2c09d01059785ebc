//! Converts CUDA's errors, and reads the record that a kernel leaves when one of its waits times out.

use crate::driver::raw::Raw;
use cudarc::driver::sys::{self, CUresult};
use dsrun_core::{Code, Error};
use std::{ffi::CStr, fmt, ptr};

/// The error code of a status.
fn code(status: CUresult) -> Code {
    match status {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Code::OutOfMemory,
        CUresult::CUDA_ERROR_NO_DEVICE
        | CUresult::CUDA_ERROR_INVALID_DEVICE
        | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
        | CUresult::CUDA_ERROR_SYSTEM_NOT_READY
        | CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        | CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
        | CUresult::CUDA_ERROR_STUB_LIBRARY
        | CUresult::CUDA_ERROR_OPERATING_SYSTEM => Code::Unavailable,
        CUresult::CUDA_ERROR_NOT_SUPPORTED | CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => Code::Unsupported,
        status if stays(status) => Code::DeviceLost,
        _ => Code::Internal,
    }
}

/// Whether a status is sticky: the context is unusable from then on.
pub(crate) fn stays(status: CUresult) -> bool {
    matches!(
        status,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}

/// The error for a status that is not success; `what` names the operation. The driver must be present.
pub(crate) fn error(status: CUresult, what: &str) -> Error {
    let mut text = ptr::null();
    // SAFETY: `text` is a place for a pointer to a string that lives as long as the driver.
    let known = unsafe { sys::cuGetErrorString(status, &raw mut text) } == CUresult::CUDA_SUCCESS;
    let text = match known && !text.is_null() {
        // SAFETY: the driver gave a terminated string.
        true => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        false => "no description".into(),
    };
    Error::new(code(status), format!("{what}: {text} ({status:?})"))
}

/// Success, or the error. For calls outside of a [`crate::driver::context::Context`].
pub(crate) fn check(status: CUresult, what: &str) -> dsrun_core::Result<()> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        status => Err(error(status, what)),
    }
}

/// Pinned memory in which a kernel records a wait that timed out, before it faults: `kernels/waits.cuh`.
pub(crate) struct WaitRecord {
    host: Raw<[u64; 2]>,
    /// The device address of the record.
    pub(crate) pointer: u64,
}

impl WaitRecord {
    /// An empty record. A context must be current.
    pub(crate) fn new() -> dsrun_core::Result<Self> {
        let (mut host, mut pointer) = (ptr::null_mut(), 0);
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the pointers are to places of the right type; the memory is as long as it is said to be, and is written
        // only if it was allocated.
        unsafe {
            let status = sys::cuMemHostAlloc(&raw mut host, size_of::<[u64; 2]>(), flags);
            check(status, "pinning host memory")?;
            ptr::write_bytes(host.cast::<u64>(), 0, 2);
            let status = sys::cuMemHostGetDevicePointer_v2(&raw mut pointer, host, 0);
            if let Err(error) = check(status, "mapping pinned memory") {
                sys::cuMemFreeHost(host);
                return Err(error);
            }
        }
        Ok(Self { host: Raw(host.cast()), pointer })
    }

    /// Frees the memory. No kernel that knows of it may run any more.
    pub(crate) fn free(&self) {
        // SAFETY: allocated by `new`; the owner frees it once.
        unsafe { sys::cuMemFreeHost(self.host.0.cast()) };
    }
}

/// A suffix for an error message; empty if no wait has timed out.
impl fmt::Display for WaitRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: the memory lives as long as the record is used; the device writes it at most once, whole words at a time.
        let [name, block] = unsafe { ptr::read_volatile(self.host.0) };
        if name == 0 {
            return Ok(());
        }
        let letters = name.to_le_bytes();
        let letters = letters.split(|letter| *letter == 0).next().unwrap_or_default();
        write!(f, "; block {block} timed out waiting for `{}` of another block", letters.escape_ascii())
    }
}
