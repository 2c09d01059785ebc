//! Building ahead with a plugin: the extension `prepare`, if it has it.

use super::{Plugin, Raw, call, device::PluginDevice};
use crate::{PREPARE_EXTENSION, encode::EncodedCall, prefix, raw::*};
use dsrun_core::{Error, Result, checked::ValidCall};
use std::{ptr, sync::Arc};

/// A device that is not here.
pub(super) fn describe(plugin: &Arc<Plugin>, name: &str) -> Result<PluginDevice> {
    let Some(table) = plugin.extension::<dsr_prepare_api>(PREPARE_EXTENSION)? else {
        let message = format!("the backend builds nothing ahead for a device that is not here, as {name:?}");
        return Err(Error::unsupported(message));
    };
    let mut handle = ptr::null_mut();
    plugin.health.call("plugin", || {
        let backend = plugin.tables.api.backend;
        Ok(call!(table, device_describe(backend, prefix::str_of(name), &raw mut handle)))
    })?;
    PluginDevice::of(plugin, Raw::new(handle, "device")?)
}

/// Has a plugin build what a graph of such calls would need; nothing if it does not have the extension.
pub(super) fn graph(device: &PluginDevice, calls: &[ValidCall]) -> Result<()> {
    let open = &device.open;
    let Some(table) = open.plugin.extension::<dsr_prepare_api>(PREPARE_EXTENSION)? else { return Ok(()) };
    let encoded = calls.iter().map(|call| EncodedCall::new(call)).collect::<Result<Vec<_>>>()?;
    let groups = calls.iter().map(|call| device.group(call)).collect::<Result<Vec<_>>>()?;
    let calls: Vec<_> =
        encoded.iter().zip(&groups).map(|(call, group)| device.raw_call(call, group)).collect();
    let calls: Vec<_> = calls.iter().map(ptr::from_ref).collect();
    open.health
        .call("device", || Ok(call!(table, graph_prepare(open.handle.get(), calls.as_ptr(), calls.len()))))
}
