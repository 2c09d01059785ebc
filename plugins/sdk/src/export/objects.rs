//! The objects behind handles.

use crate::{decode, host_table::value_or, raw::*};
use dsrun_core::{
    Code, Error, Result,
    device::{Buffer, Device, Stream},
    kernels::PackedWeight,
};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// A type of objects with handles.
pub(super) trait Object: Sized {
    /// The C type that the handle points to.
    type Raw;
    /// Distinguishes the types.
    const KIND: usize;
    /// The name in errors.
    const NAME: &'static str;
}

impl Object for Arc<dyn Device> {
    type Raw = dsr_device;
    const KIND: usize = 1;
    const NAME: &'static str = "device";
}

impl Object for Arc<dyn Buffer> {
    type Raw = dsr_buffer;
    const KIND: usize = 2;
    const NAME: &'static str = "buffer";
}

impl Object for Mutex<Box<dyn Stream>> {
    type Raw = dsr_stream;
    const KIND: usize = 3;
    const NAME: &'static str = "stream";
}

impl Object for Arc<dyn PackedWeight> {
    type Raw = dsr_weight;
    const KIND: usize = 5;
    const NAME: &'static str = "weight";
}

/// The target of a handle.
#[repr(C)]
struct Handle<T> {
    tag: usize,
    object: T,
}

/// Its address differs between copies of the crate, so that handles of other plugins are detected.
static TAG: [u8; 32] = [0; 32];

fn tag<T: Object>() -> usize {
    (&raw const TAG as usize).wrapping_add(T::KIND)
}

/// Makes the handle of an object.
pub(super) fn hand_out<T: Object>(object: T) -> *mut T::Raw {
    Box::into_raw(Box::new(Handle { tag: tag::<T>(), object })).cast()
}

/// The object behind a handle.
///
/// # Errors
/// If the handle is null, or has the tag of another type or another copy of the crate.
///
/// # Safety
/// A pointer that is not null is readable for a word; if that word is our tag, it came from [`hand_out`], and is not freed
/// during `'a`.
pub(super) unsafe fn object<'a, T: Object>(handle: *const T::Raw) -> Result<&'a T> {
    let handle = handle.cast::<Handle<T>>();
    if handle.is_null() {
        return Err(Error::invalid("is null").at(T::NAME));
    }
    // SAFETY: readable for a word, as the caller says.
    if !handle.is_aligned() || unsafe { handle.cast::<usize>().read() } != tag::<T>() {
        return Err(Error::invalid(format!("is not a {} of this backend", T::NAME)).at(T::NAME));
    }
    // SAFETY: it has our tag, so the caller says that it is ours and lives.
    Ok(unsafe { &(*handle).object })
}

/// Drops the object behind a handle. Null and foreign handles are ignored.
///
/// # Safety
/// As [`object`], and the handle is not used afterwards.
pub(super) unsafe fn give_back<T: Object>(raw: *mut T::Raw) {
    if raw.is_null() {
        return;
    }
    value_or((), || {
        // SAFETY: the caller's obligations are the same.
        unsafe { object::<T>(raw) }?;
        let handle = raw.cast::<Handle<T>>();
        // SAFETY: it has our tag and is not used afterwards. Clearing the tag detects a second free if the memory is not reused;
        // the write is volatile so that it is not optimised away.
        let owned = unsafe {
            handle.cast::<usize>().write_volatile(0);
            Box::from_raw(handle)
        };
        drop(owned);
        Ok(())
    });
}

/// Exclusive access to an object that one thread at a time may use.
///
/// # Errors
/// If another thread uses it at the same time, or a call on it has panicked.
pub(super) fn exclusive<'a, T>(object: &'a Mutex<T>, name: &str) -> Result<MutexGuard<'a, T>> {
    object.try_lock().map_err(|error| match error {
        TryLockError::Poisoned(_) => {
            Error::new(Code::Panic, "cannot be used, because a call on it has panicked").at(name)
        }
        TryLockError::WouldBlock => {
            Error::new(Code::FailedPrecondition, "is in use by another thread").at(name)
        }
    })
}

/// The buffers and weights of this backend.
pub(super) struct Ours;

impl decode::Objects for Ours {
    fn buffer(&mut self, handle: *mut dsr_buffer) -> Result<Arc<dyn Buffer>> {
        // SAFETY: the handle is in what the caller of a shim passes, so it is null or our buffer.
        unsafe { object::<Arc<dyn Buffer>>(handle) }.cloned()
    }

    fn weight(&mut self, handle: *mut dsr_weight) -> Result<Arc<dyn PackedWeight>> {
        // SAFETY: as above, for a weight.
        unsafe { object::<Arc<dyn PackedWeight>>(handle) }.cloned()
    }
}

/// Runs with exclusive access to a stream.
///
/// # Safety
/// `raw` is null or our stream.
pub(super) unsafe fn with_stream<T>(
    raw: *mut dsr_stream,
    run: impl FnOnce(&mut dyn Stream) -> Result<T>,
) -> Result<T> {
    // SAFETY: as the caller says.
    let stream = unsafe { object::<Mutex<Box<dyn Stream>>>(raw) }?;
    let mut stream = exclusive(stream, "stream")?;
    run(&mut **stream)
}
