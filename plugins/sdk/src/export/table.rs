//! An exported backend with its table, and the macro that all tables are made by.

use crate::raw::*;
use dsrun_core::{Error, Result, device::Backend};
use std::sync::Arc;

/// An exported backend, which is made once and never dropped.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) api: dsr_plugin_api,
}

// SAFETY: the targets of the pointers never change and are never freed.
unsafe impl Send for Made {}
// SAFETY: as above.
unsafe impl Sync for Made {}

/// # Safety
/// `backend` is null or that of our table.
pub(super) unsafe fn backend<'a>(backend: *mut dsr_backend) -> Result<&'a Arc<dyn Backend>> {
    // SAFETY: as the caller says; it is never freed.
    let made = unsafe { backend.cast::<Made>().as_ref() };
    Ok(&made.ok_or_else(|| Error::invalid("is null").at("backend"))?.backend)
}

/// A table with its size, whose reserved fields are 0.
macro_rules! table {
    ($type:ident { $($function:ident),* $(,)? }) => {
        $type {
            struct_size: size_of::<$type>() as u32,
            reserved: 0,
            $($function: Some($function),)*
        }
    };
}
pub(super) use table;
