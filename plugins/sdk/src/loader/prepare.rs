//! The extension `prepare` of a plugin.

use super::{Plugin, Raw, call, device::PluginDevice};
use crate::{PREPARE_EXTENSION, encode::EncodedCall, prefix, raw::*};
use dsrun_core::{Error, Result, checked::ValidCall};
use std::{ptr, sync::Arc};

/// Opens an offline device.
pub(super) fn describe(plugin: &Arc<Plugin>, name: &str) -> Result<PluginDevice> {
    let Some(table) = plugin.extension::<dsr_prepare_api>(PREPARE_EXTENSION)? else {
        let message = format!("the backend cannot compile ahead of time for {name:?} or any other device");
        return Err(Error::unsupported(message));
    };
    let mut handle = ptr::null_mut();
    plugin.health.call("plugin", || {
        let backend = plugin.tables.api.backend;
        Ok(call!(table, device_describe(backend, prefix::str_of(name), &raw mut handle)))
    })?;
    PluginDevice::of(plugin, Raw::new(handle, "device")?)
}

/// Compiles the kernels that a graph of these calls needs, if the plugin has the extension.
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
