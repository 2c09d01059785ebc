//! The extension `prepare` of a plugin.

use super::{
    device::PluginDevice,
    plugin::{Plugin, Raw, call},
};
use crate::{extension, prefix, raw::*};
use dsrun_core::{Error, Result};
use std::{ptr, sync::Arc};

/// Opens an offline device.
pub(super) fn describe(plugin: &Arc<Plugin>, name: &str) -> Result<PluginDevice> {
    let Some(table) = plugin.extension::<dsr_prepare_api>(extension::PREPARE)? else {
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
