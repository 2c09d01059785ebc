//! What the objects of a device hold of it, and its memory.

use super::plugin::{Health, Plugin, Raw, free};
use crate::{encode, raw::*};
use dsrun_core::{
    Error, Result,
    device::{Buffer, BufferSlice, MemoryKind},
};
use std::{any::Any, ptr::NonNull, sync::Arc};

/// An open device, which all objects made from it hold.
#[derive(Debug)]
pub(super) struct OpenDevice {
    pub(super) plugin: Arc<Plugin>,
    pub(super) handle: Raw<dsr_device>,
    pub(super) health: Health,
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        free!(self.plugin.tables.api, device_close, self.handle);
    }
}

/// Memory of a plugin.
#[derive(Debug)]
pub(super) struct PluginBuffer {
    pub(super) handle: Raw<dsr_buffer>,
    pub(super) bytes: usize,
    pub(super) kind: MemoryKind,
    pub(super) host_pointer: Option<Raw<u8>>,
    pub(super) open: Arc<OpenDevice>,
}

impl Drop for PluginBuffer {
    fn drop(&mut self) {
        free!(self.open.plugin.tables.memory, free, self.handle);
    }
}

impl Buffer for PluginBuffer {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }

    fn host_pointer(&self) -> Option<NonNull<u8>> {
        self.host_pointer.as_ref().map(|pointer| pointer.0)
    }
}

/// Encodes a range of a buffer of this plugin.
///
/// # Errors
/// If the buffer belongs to another backend.
pub(super) fn slice(plugin: &Arc<Plugin>, slice: &BufferSlice) -> Result<dsr_slice> {
    let any: &dyn Any = &*slice.buffer;
    match any.downcast_ref::<PluginBuffer>() {
        Some(buffer) if Arc::ptr_eq(&buffer.open.plugin, plugin) => {
            Ok(encode::slice(buffer.handle.get(), slice))
        }
        _ => Err(Error::invalid("is a buffer of another backend").field("buffer")),
    }
}
