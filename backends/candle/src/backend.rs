//! The backend: its name and its one device.

use crate::kernels::CandleKernels;
use dsrun_core::{
    Result,
    device::{Backend, BackendInfo, Device, DeviceInfo, DeviceOptions},
};
use std::sync::Arc;

/// The reference backend.
#[derive(Debug)]
pub struct CandleBackend {
    info: BackendInfo,
}

impl CandleBackend {
    /// The backend. It needs nothing but the host.
    pub fn new() -> Self {
        let info = BackendInfo {
            name: "candle".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            description: "The reference: every op in candle tensors, on the CPU".into(),
        };
        Self { info }
    }
}

impl Default for CandleBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for CandleBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![dsrun_host::device_info()])
    }

    fn open(&self, index: usize, options: &DeviceOptions) -> Result<Arc<dyn Device>> {
        dsrun_host::open(&self.info.name, index, options, |_| CandleKernels)
    }
}
