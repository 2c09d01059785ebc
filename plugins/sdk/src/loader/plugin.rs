//! A plugin, the handles of its objects, and calls of its functions.

use super::tables::Tables;
use crate::{prefix, prefix::Prefixed, raw::*, status};
use dsrun_core::{Code, Error, Result};
use std::{
    fmt,
    ptr::NonNull,
    sync::atomic::{AtomicBool, Ordering},
};

/// The tables of a plugin, and whether it has panicked.
pub(super) struct Plugin {
    pub(super) tables: Tables,
    pub(super) health: Health,
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plugin").finish_non_exhaustive()
    }
}

// SAFETY: by the contract of the ABI the tables are valid forever, and any thread may call their functions.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

impl Plugin {
    /// The table of an extension; `None` if the plugin does not have it.
    ///
    /// # Errors
    /// If the plugin has panicked, or the table is invalid.
    pub(super) fn extension<T: Prefixed>(&self, name: &str) -> Result<Option<T>> {
        self.health.check("plugin")?;
        let Some(get_extension) = self.tables.api.get_extension else { return Ok(None) };
        // SAFETY: a function of the plugin with its backend, and a text that lives during the call.
        let table = unsafe { get_extension(self.tables.api.backend, prefix::str_of(name)) };
        if table.is_null() {
            return Ok(None);
        }
        // SAFETY: the name of an extension determines the type of its table, which callers pass as `T`; it is valid forever.
        unsafe { prefix::read(table.cast::<T>()) }.map(Some)
    }
}

/// Whether an object may still be used: after a panic its state is unknown.
#[derive(Debug, Default)]
pub(super) struct Health(AtomicBool);

impl Health {
    /// Makes a call on the object, unless a call on it has panicked.
    pub(super) fn call(&self, what: &str, run: impl FnOnce() -> Result<*mut dsr_status>) -> Result<()> {
        self.check(what)?;
        // SAFETY: a plugin returns null or a status of the host, and keeps none.
        let result = run().and_then(|status| unsafe { status::take(status) });
        if matches!(&result, Err(error) if error.code() == Code::Panic) {
            self.0.store(true, Ordering::Relaxed);
        }
        result
    }

    pub(super) fn check(&self, what: &str) -> Result<()> {
        if !self.0.load(Ordering::Relaxed) {
            return Ok(());
        }
        let message = format!("the {what} cannot be used, because the backend has panicked in a call on it");
        Err(Error::new(Code::Panic, message))
    }
}

/// A handle of a plugin.
pub(super) struct Raw<T>(pub(super) NonNull<T>);

// SAFETY: by the contract of the ABI objects may move between threads; those that one thread at a time may use are wrapped in
// types that are not `Sync` or take `&mut self`.
unsafe impl<T> Send for Raw<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Raw<T> {}

impl<T> fmt::Debug for Raw<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Pointer::fmt(&self.0, f)
    }
}

impl<T> Raw<T> {
    /// A handle that a plugin has returned.
    ///
    /// # Errors
    /// If it is null.
    pub(super) fn new(pointer: *mut T, what: &str) -> Result<Self> {
        let made = NonNull::new(pointer).map(Self);
        made.ok_or_else(|| Error::internal(format!("the plugin reported success, but returned no {what}")))
    }

    pub(super) fn get(&self) -> *mut T {
        self.0.as_ptr()
    }
}

/// Calls a function of a plugin.
macro_rules! call {
    ($table:expr, $slot:ident($($argument:expr),* $(,)?)) => {{
        let function = $table.$slot.ok_or_else(|| $crate::loader::plugin::missing(stringify!($slot)))?;
        // SAFETY: a function of the plugin with arguments as `dsrun.h` requires: live handles of this plugin, structs with
        // their sizes, and memory that is borrowed during the call.
        unsafe { function($($argument),*) }
    }};
}

/// Frees an object with a function of a plugin.
macro_rules! free {
    ($table:expr, $slot:ident, $handle:expr) => {
        if let Some(function) = $table.$slot {
            // SAFETY: a live handle of this plugin, which is not used again because its owner is being dropped.
            unsafe { function($handle.get()) }
        }
    };
}

pub(super) use {call, free};

/// The error for a table that the plugin lacks, or a function.
pub(super) fn missing(slot: &str) -> Error {
    Error::internal(format!("the plugin has no `{slot}`"))
}
