//! The one device of a host backend, and what a handle on it owns.

use crate::{
    graph::HostGraphs,
    host::{Host, cores, host_memory},
    kernels::{Compute, HostKernels},
    memory::{ALIGNMENT, HostBuffer},
    stream::{HostEvent, HostStream},
};
use dsrun_core::{
    DType, Error, Result,
    collective::{Collective, host::HostCollective},
    device::{
        Buffer, Device, DeviceInfo, DeviceOptions, DeviceProperties, Event, Flushed, MemoryKind, MemoryUse,
        Stream,
    },
    graph::Graphs,
    kernels::Kernels,
    op::Profile,
};
use std::sync::Arc;

/// The host as a device of a backend.
pub fn device_info() -> DeviceInfo {
    DeviceInfo { index: 0, name: device_name(), memory_bytes: host_memory() }
}

/// Opens the host as device `index` of `backend`; `compute` is given the number of threads.
///
/// # Errors
/// If the index is not 0, or an option makes no sense.
pub fn open<C: Compute>(
    backend: &str,
    index: usize,
    options: &DeviceOptions,
    compute: impl FnOnce(usize) -> C,
) -> Result<Arc<dyn Device>> {
    if index != 0 {
        return Err(Error::invalid(format!("is {index}, but {backend} has device 0 only")).at("device"));
    }
    let host = Arc::new(Host::new(backend, options)?);
    let compute = compute(host.pool.current_num_threads());
    Ok(Arc::new(HostDevice::new(host, compute)))
}

fn device_name() -> String {
    format!("CPU ({}, {} cores)", std::env::consts::ARCH, cores())
}

/// An open device.
#[derive(Debug)]
struct HostDevice<C> {
    host: Arc<Host>,
    properties: DeviceProperties,
    kernels: HostKernels<C>,
    collective: HostCollective,
    graphs: HostGraphs,
}

impl<C: Compute> HostDevice<C> {
    fn new(host: Arc<Host>, compute: C) -> Self {
        let properties = DeviceProperties {
            name: device_name(),
            memory_bytes: host_memory().unwrap_or(0),
            alignment: ALIGNMENT,
            dtypes: vec![DType::F32, DType::BF16, DType::F16],
            profiles: Profile::ALL.to_vec(),
            strict_nan: true,
            flushed: Flushed::default(),
            unified_memory: true,
            binds_pinned: true,
        };
        let (kernels, graphs) = (HostKernels::new(host.clone(), compute), HostGraphs::new(host.clone()));
        Self { host, properties, kernels, collective: HostCollective, graphs }
    }
}

impl<C: Compute> Device for HostDevice<C> {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&self) -> MemoryUse {
        MemoryUse { used: self.host.account.used(), free: self.host.account.free() }
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        Ok(Arc::new(HostBuffer::new(self.host.clone(), bytes, kind)?))
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(HostStream::new(self.host.clone())))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(HostEvent::default()))
    }

    fn kernels(&self) -> &dyn Kernels {
        &self.kernels
    }

    fn collective(&self) -> Option<&dyn Collective> {
        Some(&self.collective)
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        Some(&self.graphs)
    }
}
