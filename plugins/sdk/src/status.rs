//! Errors across the ABI.
//!
//! The host makes and frees all of them, so that an error can outlive its maker and there is one destructor.

use super::{prefix, raw::*};
use dsrun_core::{Code, Error, Result};
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
};

/// The message of an error whose maker gave none.
pub const NO_MESSAGE: &str = "no message was given";

/// The number of errors that were made and not freed.
pub(super) static LIVE: AtomicUsize = AtomicUsize::new(0);

/// Converts an error to a status, which the other side owns.
pub(super) fn into_raw(error: Error) -> *mut dsr_status {
    LIVE.fetch_add(1, Ordering::Relaxed);
    Box::into_raw(Box::new(error)).cast()
}

/// Converts a status back and frees it; null is success.
///
/// # Errors
/// The error of the status.
///
/// # Safety
/// `status` is null or came from [`into_raw`] of this copy of the crate, and is not used afterwards.
pub(super) unsafe fn take(status: *mut dsr_status) -> Result<()> {
    if status.is_null() {
        return Ok(());
    }
    LIVE.fetch_sub(1, Ordering::Relaxed);
    // SAFETY: made by `into_raw` from a box, and owned by us as the caller says.
    Err(*unsafe { Box::from_raw(status.cast::<Error>()) })
}

/// The description of an error for the other side, valid as long as the error lives.
pub(super) fn describe(error: &Error) -> dsr_error {
    let text = |value: Option<&str>| prefix::str_of(value.unwrap_or_default());
    dsr_error {
        code: error.code() as u32,
        message: prefix::str_of(error.message()),
        op: text(error.op()),
        argument: text(error.argument()),
        field: text(error.field_name()),
        ..prefix::zeroed()
    }
}

/// The error with a description of the other side.
///
/// # Safety
/// The texts are readable.
pub(super) unsafe fn from_description(description: &dsr_error) -> Error {
    // SAFETY: as the caller says.
    let [message, op, argument, field] =
        [description.message, description.op, description.argument, description.field]
            .map(|value| unsafe { prefix::text(value) });
    let (code, message) = match Code::from_number(description.code) {
        Some(code) => (code, message.into_owned()),
        None => (Code::Internal, format!("{message} (with unknown code {})", description.code)),
    };
    let message = if message.is_empty() { NO_MESSAGE.to_owned() } else { message };
    let mut error = Error::new(code, message);
    if !op.is_empty() {
        error = error.in_op(&op);
    }
    if !argument.is_empty() {
        error = error.at(&argument);
    }
    if !field.is_empty() {
        error = error.field(field);
    }
    error
}

/// Runs code that must not unwind; a panic becomes an error.
pub(super) fn catch<T>(run: impl FnOnce() -> Result<T>) -> Result<T> {
    // State that a panic leaves inconsistent is not used again: the receiver of the error poisons the object.
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Err(panic_error(panic)))
}

fn panic_error(panic: Box<dyn Any + Send>) -> Error {
    let message = match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(message), _) => (*message).to_owned(),
        (_, Some(message)) => message.clone(),
        _ => "a panic without a message".to_owned(),
    };
    // Dropping the payload may panic again, which must not unwind either.
    std::mem::forget(panic);
    Error::new(Code::Panic, message)
}

/// Converts a result to the status that a function of the host returns.
pub(super) fn returned(run: impl FnOnce() -> Result<()>) -> *mut dsr_status {
    catch(run).map_or_else(into_raw, |()| ptr::null_mut())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_cross_with_everything_they_say() {
        let error = Error::new(Code::Timeout, "too slow").in_op("linear").at("x").field("shape[0]");
        let description = describe(&error);
        // SAFETY: the texts live in `error`.
        assert_eq!(unsafe { from_description(&description) }, error);
        // SAFETY: made by `into_raw`.
        assert_eq!(unsafe { take(into_raw(error.clone())) }, Err(error));
        // SAFETY: null is success.
        assert_eq!(unsafe { take(ptr::null_mut()) }, Ok(()));
    }

    #[test]
    fn a_code_that_is_none_and_an_empty_message_are_said_so() {
        let description = dsr_error { code: 77, ..prefix::zeroed() };
        // SAFETY: empty texts.
        let error = unsafe { from_description(&description) };
        assert_eq!(error.code(), Code::Internal);
        assert!(error.message().contains("77"), "{error}");
    }

    #[test]
    fn panics_become_errors_with_their_message() {
        let error = catch::<()>(|| panic!("index {} is out", 3)).unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::Panic, "index 3 is out"));
        let error = catch::<()>(|| std::panic::panic_any(5u8)).unwrap_err();
        assert_eq!(error.code(), Code::Panic);
    }
}
