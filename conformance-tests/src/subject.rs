//! The backend under test.

use dsrun_core::{
    DType, Result,
    device::{Backend, Device, DeviceOptions},
    kernels::cache_support,
    op::Profile,
};
use dsrun_plugin_sdk::{PluginBackend, raw::dsr_plugin_api};
use std::sync::{Arc, Mutex, PoisonError};

/// A backend under test, and the devices that were opened for it.
#[derive(Debug)]
pub struct Subject {
    backend: Arc<dyn Backend>,
    plugin: Option<PluginBackend>,
    index: usize,
    options: DeviceOptions,
    /// The device under test, then one for each further rank that a case needed.
    devices: Mutex<Vec<Arc<dyn Device>>>,
    device: Arc<dyn Device>,
}

impl Subject {
    /// Opens device `index` of a backend that is linked into the program.
    ///
    /// # Errors
    /// As [`Backend::open`].
    pub fn linked(backend: Arc<dyn Backend>, index: usize, options: DeviceOptions) -> Result<Self> {
        let device = backend.open(index, &options)?;
        let devices = Mutex::new(vec![device.clone()]);
        Ok(Self { backend, plugin: None, index, options, devices, device })
    }

    /// Opens device `index` of a plugin.
    ///
    /// # Errors
    /// As [`Backend::open`].
    pub fn plugin(plugin: PluginBackend, index: usize, options: DeviceOptions) -> Result<Self> {
        let subject = Self::linked(Arc::new(plugin.clone()), index, options)?;
        Ok(Self { plugin: Some(plugin), ..subject })
    }

    /// The backend. Devices of a plugin that are opened through it include the checks of the plugin's wrapper.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The plugin's own function table, without the checks of the wrapper; `None` if the backend is linked in.
    pub fn raw_table(&self) -> Option<&dsr_plugin_api> {
        self.plugin.as_ref().map(PluginBackend::raw_table)
    }

    /// The plugin; `None` if the backend is linked in.
    pub fn loaded(&self) -> Option<&PluginBackend> {
        self.plugin.as_ref()
    }

    /// The index of the device under test.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The options with which devices are opened.
    pub fn options(&self) -> &DeviceOptions {
        &self.options
    }

    /// The device under test.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Devices for `count` ranks, the device under test first. If the backend has fewer, ranks share a device, each with its own
    /// handle.
    ///
    /// # Errors
    /// As [`Backend::open`].
    pub fn ranks(&self, count: usize) -> Result<Vec<Arc<dyn Device>>> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        while devices.len() < count {
            let there = self.backend.devices()?.len().max(1);
            let index = (self.index + devices.len()) % there;
            devices.push(self.backend.open(index, &self.options)?);
        }
        Ok(devices[..count].to_vec())
    }

    /// Whether the device claims a profile.
    pub fn claims(&self, profile: Profile) -> bool {
        self.device.properties().profiles.contains(&profile)
    }

    /// Whether the device says that it runs `kv_write` with an i8 cache. Then all ops of such caches are required.
    pub fn takes_i8_caches(&self) -> bool {
        cache_support(self.device.kernels(), DType::I8).is_ok_and(|support| support.native)
    }

    /// Whether the device lists an element type. All devices support integers.
    pub fn takes(&self, dtype: DType) -> bool {
        !dtype.is_float() || self.device.properties().dtypes.contains(&dtype)
    }
}
