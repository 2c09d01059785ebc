//! A backend for dsrun as a plugin, with one device: the host, which runs work when it is enqueued.

mod kernels;
mod memory;

use dsrun_core::{
    Code, DType, Error, Result,
    device::{
        Backend, BackendInfo, Buffer, Device, DeviceInfo, DeviceOptions, DeviceProperties, Event, MemoryKind,
        MemoryUse, Stream,
    },
    kernels::Kernels,
};
use memory::{Account, HostBuffer, HostEvent, HostStream};
use std::sync::Arc;

dsrun_plugin_sdk::export_backend!(MyBackend::new());

/// The backend.
#[derive(Debug)]
pub struct MyBackend {
    info: BackendInfo,
}

impl MyBackend {
    /// Makes the backend. Look for drivers and libraries when devices are listed, not here.
    pub fn new() -> Self {
        let info = BackendInfo {
            name: "my-backend".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            description: "A starting point for a backend: three ops in f32".into(),
        };
        Self { info }
    }
}

impl Default for MyBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for MyBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![DeviceInfo { index: 0, name: "host".into(), memory_bytes: None }])
    }

    fn open(&self, index: usize, options: &DeviceOptions) -> Result<Arc<dyn Device>> {
        if index != 0 {
            return Err(Error::invalid(format!("is {index}, but the only device is 0")).at("index"));
        }
        let properties = DeviceProperties {
            name: "host".into(),
            memory_bytes: 0,
            alignment: 64,
            dtypes: vec![DType::F32],
            // List a profile here when the device has all of its ops.
            profiles: Vec::new(),
            strict_nan: true,
            flushed: dsrun_core::device::Flushed::default(),
            unified_memory: false,
            binds_pinned: false,
        };
        Ok(Arc::new(HostDevice { properties, account: Arc::new(Account::new(options.memory_limit)) }))
    }
}

/// An open device.
#[derive(Debug)]
pub(crate) struct HostDevice {
    properties: DeviceProperties,
    account: Arc<Account>,
}

impl Device for HostDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&self) -> MemoryUse {
        self.account.memory()
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        Ok(Arc::new(HostBuffer::new(&self.account, bytes, kind)?))
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(HostStream))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(HostEvent::default()))
    }

    fn kernels(&self) -> &dyn Kernels {
        self
    }
}

/// The error of an allocation that exceeds the free memory.
pub(crate) fn out_of_memory(bytes: usize, free: u64) -> Error {
    Error::new(Code::OutOfMemory, format!("{bytes} bytes requested, {free} are free"))
}
