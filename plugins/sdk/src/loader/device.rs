//! Devices of a plugin.

use super::{
    open_device::{OpenDevice, PluginBuffer},
    plugin::{Health, Plugin, Raw, call},
    stream::{PluginEvent, PluginStream},
};
use crate::{host::TextSink, prefix, raw::*};
use dsrun_core::{
    DType, Error, Result,
    collective::Collective,
    device::{Buffer, Device, DeviceProperties, Event, Flushed, MemoryKind, MemoryUse, Stream},
    graph::Graphs,
    kernels::Kernels,
    op::Profile,
};
use std::{
    ptr::{self, NonNull},
    sync::Arc,
};

/// A device of a plugin.
#[derive(Debug)]
pub(super) struct PluginDevice {
    pub(super) open: Arc<OpenDevice>,
    properties: DeviceProperties,
    flags: u64,
}

impl PluginDevice {
    pub(super) fn open(plugin: &Arc<Plugin>, index: u32, options: &dsr_device_options) -> Result<Self> {
        let api = &plugin.tables.api;
        let mut handle = ptr::null_mut();
        plugin.health.call("plugin", || {
            Ok(call!(api, device_open(api.backend, index, ptr::from_ref(options), &raw mut handle)))
        })?;
        Self::of(plugin, Raw::new(handle, "device")?)
    }

    /// Wraps a device that the plugin has opened.
    pub(super) fn of(plugin: &Arc<Plugin>, handle: Raw<dsr_device>) -> Result<Self> {
        let api = &plugin.tables.api;
        let open = Arc::new(OpenDevice { plugin: plugin.clone(), handle, health: Health::default() });
        let mut name = TextSink::default();
        let mut raw = dsr_device_properties { name: name.as_raw(), ..prefix::zeroed() };
        let pointer = &raw mut raw;
        open.health.call("device", || Ok(call!(api, device_properties(open.handle.get(), pointer))))?;
        if !raw.alignment.is_power_of_two() {
            let message =
                format!("the alignment of the plugin is {}, which is not a power of two", raw.alignment);
            return Err(Error::internal(message).at("device"));
        }
        let has = |number: u32, mask: u64| number < 64 && mask >> number & 1 == 1;
        let types = |mask: u64| DType::ALL.into_iter().filter(|dtype| has(*dtype as u32, mask)).collect();
        let properties = DeviceProperties {
            name: name.into_text(),
            memory_bytes: raw.memory_bytes,
            alignment: raw.alignment as usize,
            dtypes: types(raw.dtypes),
            profiles: Profile::ALL.into_iter().filter(|profile| has(*profile as u32, raw.profiles)).collect(),
            strict_nan: raw.flags & DSR_DEVICE_STRICT_NAN != 0,
            flushed: Flushed { operands: types(raw.flushed_operands), results: types(raw.flushed_results) },
            unified_memory: raw.flags & DSR_DEVICE_UNIFIED_MEMORY != 0,
            binds_pinned: raw.flags & DSR_DEVICE_BINDS_PINNED != 0,
        };
        Ok(Self { open, properties, flags: raw.flags })
    }
}

impl Device for PluginDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&self) -> MemoryUse {
        let table = &self.open.plugin.tables.memory;
        let mut raw = dsr_memory_use { free: DSR_NONE, ..prefix::zeroed() };
        let pointer = &raw mut raw;
        let asked =
            self.open.health.call("device", || Ok(call!(table, memory_use(self.open.handle.get(), pointer))));
        if let Err(error) = asked {
            tracing::warn!("a device cannot report its memory use: {error}");
            return MemoryUse::default();
        }
        MemoryUse { used: raw.used, free: (raw.free != DSR_NONE).then_some(raw.free) }
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        let table = &self.open.plugin.tables.memory;
        let mut handle = ptr::null_mut();
        self.open.health.call("device", || {
            Ok(call!(table, allocate(self.open.handle.get(), bytes as u64, kind as u32, &raw mut handle)))
        })?;
        let mut buffer = PluginBuffer {
            handle: Raw::new(handle, "buffer")?,
            bytes,
            kind,
            host_pointer: None,
            open: self.open.clone(),
        };
        let address: *mut std::ffi::c_void = call!(table, host_pointer(buffer.handle.get()));
        buffer.host_pointer = NonNull::new(address.cast()).map(Raw);
        Ok(Arc::new(buffer))
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(PluginStream::create(&self.open)?))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(PluginEvent::create(&self.open)?))
    }

    fn kernels(&self) -> &dyn Kernels {
        self
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        let there = self.flags & DSR_DEVICE_GRAPHS != 0 && self.open.plugin.tables.graph.is_some();
        there.then_some(self)
    }

    fn collective(&self) -> Option<&dyn Collective> {
        let there = self.flags & DSR_DEVICE_COLLECTIVES != 0 && self.open.plugin.tables.comm.is_some();
        there.then_some(self)
    }
}
