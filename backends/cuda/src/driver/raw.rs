//! Handles of CUDA libraries.

use cudarc::driver::sys;

/// A handle, which any thread may use.
#[derive(Debug)]
pub(crate) struct Raw<T>(pub(crate) *mut T);

impl<T> Clone for Raw<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Raw<T> {}

// SAFETY: a handle is only an identifier; the library synchronises its use.
unsafe impl<T> Send for Raw<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Raw<T> {}

pub(crate) type RawStream = Raw<sys::CUstream_st>;
pub(crate) type RawEvent = Raw<sys::CUevent_st>;
