//! The functions of the host, and what shims return to it.

use crate::{prefix, raw::*, status};
use dsrun_core::{Error, Result};
use std::{ptr, sync::OnceLock};

/// The host of this copy of the crate. Every plugin has its own copy; a program that uses its own backends through the tables is
/// its own host.
pub(crate) static HOST: OnceLock<HostTable> = OnceLock::new();

/// The functions of the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostTable {
    host: *mut dsr_host,
    pub(crate) status_new: unsafe extern "C" fn(*mut dsr_host, *const dsr_error) -> *mut dsr_status,
    status_get: unsafe extern "C" fn(*mut dsr_host, *const dsr_status, *mut dsr_error),
    status_free: unsafe extern "C" fn(*mut dsr_host, *mut dsr_status),
    text_set: unsafe extern "C" fn(*mut dsr_host, *mut dsr_text, dsr_str),
    log: unsafe extern "C" fn(*mut dsr_host, u32, dsr_str),
}

// SAFETY: the functions are valid forever, and any thread may call them with the pointer beside them.
unsafe impl Send for HostTable {}
// SAFETY: as above.
unsafe impl Sync for HostTable {}

impl HostTable {
    /// The functions of a host of this version; `None` if the host has another version.
    ///
    /// # Safety
    /// The pointer is null or to a host's table.
    pub(crate) unsafe fn read(pointer: *const dsr_host_api) -> Option<Self> {
        // SAFETY: as the caller says.
        let table = unsafe { prefix::read(pointer) }.ok()?;
        if (table.abi_major, table.abi_minor) != (DSR_ABI_MAJOR, DSR_ABI_MINOR) {
            return None;
        }
        Some(Self {
            host: table.host,
            status_new: table.status_new?,
            status_get: table.status_get?,
            status_free: table.status_free?,
            text_set: table.text_set?,
            log: table.log?,
        })
    }

    /// Makes a status of the host from an error.
    pub(crate) fn error(&self, error: &Error) -> *mut dsr_status {
        let description = status::describe(error);
        // SAFETY: a function of the host, and a description that lives during the call.
        unsafe { (self.status_new)(self.host, &raw const description) }
    }

    /// Converts a status of the host and frees it.
    ///
    /// # Errors
    /// The error of the status.
    pub(crate) fn take(&self, raw: *mut dsr_status) -> Result<()> {
        if raw.is_null() {
            return Ok(());
        }
        let mut description: dsr_error = prefix::zeroed();
        // SAFETY: functions of the host, its status, which is not used afterwards, and a description whose texts live until the
        // status is freed.
        Err(unsafe {
            (self.status_get)(self.host, raw, &raw mut description);
            let error = status::from_description(&description);
            (self.status_free)(self.host, raw);
            error
        })
    }

    pub(crate) fn set_text(&self, text: *mut dsr_text, value: &str) {
        // SAFETY: a function of the host, its receiver, and a text that lives during the call.
        unsafe { (self.text_set)(self.host, text, prefix::str_of(value)) };
    }

    pub(crate) fn log(&self, level: u32, message: &str) {
        // SAFETY: a function of the host, and a text that lives during the call.
        unsafe { (self.log)(self.host, level, prefix::str_of(message)) };
    }
}

/// Runs a shim and converts its result to the status that the shim returns.
pub(crate) fn returned(run: impl FnOnce() -> Result<()>) -> *mut dsr_status {
    match (status::catch(run), HOST.get()) {
        (Ok(()), _) => ptr::null_mut(),
        (Err(error), Some(host)) => host.error(&error),
        // Only a known host gets a table with functions.
        (Err(_), None) => unreachable!("a function of a plugin is called before its entry"),
    }
}

/// The host, for shims, which run only after the entry.
pub(crate) fn host() -> Result<HostTable> {
    HOST.get().copied().ok_or_else(|| Error::internal("no host has entered this plugin"))
}

/// Runs a shim that returns a value; an error is logged, and `fallback` returned.
pub(crate) fn value_or<T>(fallback: T, run: impl FnOnce() -> Result<T>) -> T {
    status::catch(run).unwrap_or_else(|error| {
        if let Ok(host) = host() {
            host.log(DSR_LOG_ERROR, &error.to_string());
        }
        fallback
    })
}
