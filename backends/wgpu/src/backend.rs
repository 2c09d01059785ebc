//! The backend, its adapters as devices, and open devices.

use crate::{
    driver::{
        adapter::{self, ADAPTER, DeviceSpec, Matrices},
        context::Context,
        memory::WgpuBuffer,
        stream::{WgpuEvent, WgpuStream},
    },
    kernels::WgpuKernels,
    probe,
};
use dsrun_core::{
    DType, Error, Result,
    collective::{Collective, host::HostCollective},
    device::{
        Backend, BackendInfo, Buffer, Device, DeviceInfo, DeviceOptions, DeviceProperties, Event, Finding,
        Flushed, MemoryAccount, MemoryKind, MemoryUse, Stream,
    },
    kernels::Kernels,
    op::Profile,
};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The backend for GPUs of any vendor.
#[derive(Debug)]
pub struct WgpuBackend {
    info: BackendInfo,
    /// The maximum size in bytes of a part of a weight, if less than the adapter's limit.
    part_bytes: Option<usize>,
    /// Whether loops replace cooperative matrices.
    emulated: bool,
    /// The contexts of the devices that it has opened.
    opened: Mutex<Vec<Weak<Context>>>,
}

impl WgpuBackend {
    /// Makes the backend. Always succeeds: a missing driver is reported when devices are listed.
    pub fn new() -> Self {
        let info = BackendInfo {
            name: "wgpu".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            description: "GPUs through Vulkan, Metal or Direct3D 12".into(),
        };
        Self { info, part_bytes: None, emulated: false, opened: Mutex::default() }
    }

    /// A backend that splits weights longer than `bytes` into parts, each of as many rows as fit, but at least four. Weights
    /// longer than a binding of the adapter are always split; this lets tests split short ones.
    pub fn with_weight_parts(bytes: usize) -> Self {
        Self { part_bytes: Some(bytes), ..Self::new() }
    }

    /// A backend whose kernels for cooperative matrices run, with loops in their place, on adapters that compute with f16. This
    /// lets tests run these kernels without such matrices.
    pub fn with_emulated_matrices() -> Self {
        Self { emulated: true, ..Self::new() }
    }

    /// Opens an adapter, with the kernels for cooperative matrices or without.
    fn context(
        &self,
        adapter: &wgpu::Adapter,
        options: &DeviceOptions,
        matrices: bool,
    ) -> Result<Arc<Context>> {
        Context::open(adapter, MemoryAccount::new(options.memory_limit), |spec| {
            spec.part_bytes = self.part_bytes.map_or(spec.part_bytes, |bytes| bytes.min(spec.part_bytes));
            if self.emulated && spec.f16 {
                spec.matrices = Some(Matrices::Emulated);
            }
            spec.matrices = spec.matrices.filter(|_| matrices);
        })
    }

    /// Destroys all open devices of this backend, as a driver reset does, to test how a lost device is handled.
    pub fn lose_devices(&self) {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        opened.iter().filter_map(Weak::upgrade).for_each(|context| context.destroy());
    }
}

impl Default for WgpuBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl Backend for WgpuBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let adapters = adapter::offered()?;
        let one = |(index, adapter): (usize, &wgpu::Adapter)| DeviceInfo {
            index,
            name: adapter::display_name(&adapter.get_info()),
            memory_bytes: None,
        };
        Ok(adapters.iter().enumerate().map(one).collect())
    }

    fn open(&self, index: usize, options: &DeviceOptions) -> Result<Arc<dyn Device>> {
        let adapters = adapter::offered()?;
        let Some(adapter) = adapters.get(index) else {
            return Err(Error::invalid(format!("is {index}, there are {}", adapters.len())).at("device"));
        };
        if options.compute_share.is_some_and(|share| share != 1.0) {
            let message = "cannot be shared by compute units; leave it out";
            return Err(Error::unsupported(message).at("compute_share"));
        }
        let mut context = self.context(adapter, options, true)?;
        if context.spec.matrices == Some(Matrices::Cooperative)
            && !probe::multiplies(&context.spec.name, &WgpuDevice::new(context.clone()))
        {
            context = self.context(adapter, options, false)?;
        }
        if context.spec.software {
            tracing::warn!(adapter = %context.spec.name, "this adapter computes on the CPU, slower than the CPU backend");
        }
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        opened.retain(|context| context.strong_count() > 0);
        opened.push(Arc::downgrade(&context));
        drop(opened);
        let mut device = WgpuDevice::new(context);
        device.properties.flushed = probe::flushed(&device.properties.name, &device)?;
        Ok(Arc::new(device))
    }

    fn diagnose(&self) -> Vec<Finding> {
        let finding = |adapter: &wgpu::Adapter| Finding {
            subject: adapter::display_name(&adapter.get_info()),
            present: true,
            detail: DeviceSpec::new(adapter, DeviceSpec::features(adapter)).to_string(),
        };
        let found: Vec<Finding> = adapter::all().iter().map(finding).collect();
        if !found.is_empty() {
            return found;
        }
        let detail = format!("no adapter is present; install a driver ({ADAPTER} selects adapters by name)");
        vec![Finding { subject: "Vulkan, Metal or Direct3D 12".into(), present: false, detail }]
    }
}

/// An open device.
#[derive(Debug)]
struct WgpuDevice {
    context: Arc<Context>,
    properties: DeviceProperties,
    kernels: WgpuKernels,
}

impl WgpuDevice {
    fn new(context: Arc<Context>) -> Self {
        let spec = &context.spec;
        let mut dtypes = vec![DType::F32];
        dtypes.extend(spec.f16.then_some(DType::F16));
        dtypes.extend(spec.i16.then_some(DType::BF16));
        let properties = DeviceProperties {
            name: spec.name.clone(),
            memory_bytes: 0,
            alignment: spec.alignment,
            dtypes,
            profiles: vec![
                Profile::LlmCore1,
                Profile::LlmQuant1,
                Profile::LlmMoe1,
                Profile::LlmDist1,
                Profile::LlmMla1,
            ],
            strict_nan: false,
            flushed: Flushed::default(),
            unified_memory: false,
            binds_pinned: false,
        };
        Self { kernels: WgpuKernels::new(context.clone()), context, properties }
    }
}

impl Device for WgpuDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&self) -> MemoryUse {
        MemoryUse { used: self.context.account.used(), free: self.context.account.free() }
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        Ok(Arc::new(WgpuBuffer::new(self.context.clone(), bytes, kind)?))
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        Ok(Box::new(WgpuStream::new(self.context.clone())))
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(WgpuEvent::new(self.context.clone())))
    }

    fn kernels(&self) -> &dyn Kernels {
        &self.kernels
    }

    fn collective(&self) -> Option<&dyn Collective> {
        Some(&HostCollective)
    }
}
