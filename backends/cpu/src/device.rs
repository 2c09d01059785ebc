//! The backend: name, device and processor features.

use crate::kernels::CpuKernels;
use dsrun_core::{
    Result,
    device::{Backend, BackendInfo, Device, DeviceInfo, DeviceOptions, Finding},
};
use std::{sync::Arc, thread::available_parallelism};

/// The CPU backend.
#[derive(Debug)]
pub struct CpuBackend {
    info: BackendInfo,
}

impl CpuBackend {
    /// The backend. It needs nothing but the host.
    pub fn new() -> Self {
        let info = BackendInfo {
            name: "cpu".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            description: "The CPU: packed weights and SIMD kernels".into(),
        };
        Self { info }
    }
}

impl Default for CpuBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for CpuBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![dsrun_host::device_info()])
    }

    fn open(&self, index: usize, options: &DeviceOptions) -> Result<Arc<dyn Device>> {
        dsrun_host::open(&self.info.name, index, options, CpuKernels::new)
    }

    fn diagnose(&self) -> Vec<Finding> {
        let threads = available_parallelism().map_or(1, usize::from);
        let vectors = crate::simd::instruction_sets().map(|(name, present)| Finding {
            subject: name.to_owned(),
            present,
            detail: if present { "used" } else { "the processor does not have it" }.to_owned(),
        });
        let threads = Finding {
            subject: "threads".to_owned(),
            present: true,
            detail: format!("{threads}, unless asked otherwise"),
        };
        std::iter::once(threads).chain(vectors).collect()
    }
}
