//! CUDA's errors as ours.

use cudarc::driver::sys::{self, CUresult};
use dsrun_core::{Code, Error};
use std::ffi::CStr;

/// What a status means for the caller.
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

/// Whether the context is broken from here on.
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

/// The error for a status that is not success; `what` says what was being done. The driver must be present.
pub(crate) fn error(status: CUresult, what: &str) -> Error {
    let mut text = std::ptr::null();
    // SAFETY: `text` is a place for a pointer to a string that lives as long as the driver.
    let known = unsafe { sys::cuGetErrorString(status, &raw mut text) } == CUresult::CUDA_SUCCESS;
    let text = match known && !text.is_null() {
        // SAFETY: the driver gave a terminated string.
        true => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        false => "no description".into(),
    };
    Error::new(code(status), format!("{what}: {text} ({status:?})"))
}

/// Success, or the error. For calls outside of a [`crate::context::Context`].
pub(crate) fn check(status: CUresult, what: &str) -> dsrun_core::Result<()> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        status => Err(error(status, what)),
    }
}
