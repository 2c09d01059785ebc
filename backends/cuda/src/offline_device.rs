//! An offline device: kernels are selected and compiled for a GPU that is not present.

use crate::{
    arch::{DeviceSpec, known_gpus::KnownGpu},
    driver::{
        compiler::{Cache, Compiler},
        kernel_spec::KernelSpec,
        library::Library,
        stream::copy_kernel,
    },
    kernels::support,
    ops::{self, weight},
    properties::{properties, reserved},
};
use dsrun_core::{
    Code, Error, Result, WeightReader,
    checked::{ValidArguments, ValidCall},
    device::{Buffer, Device, DeviceProperties, Event, MemoryKind, MemoryUse, Stream},
    graph::{Graph, Graphs},
    kernels::{BoundCall, Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc},
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

/// An offline device.
#[derive(Debug)]
pub(crate) struct OfflineDevice {
    properties: DeviceProperties,
    device: DeviceSpec,
    compiler: Compiler,
    /// The result of compiling each kernel. Threads that need other kernels do not wait for one that is being compiled.
    built: Mutex<HashMap<KernelSpec, Arc<OnceLock<Result<()>>>>>,
}

impl OfflineDevice {
    /// A GPU by a name of [`KnownGpu::named`].
    ///
    /// # Errors
    /// If the name is incomplete, or NVRTC is missing or too old.
    pub(crate) fn open(name: &str, cache: Cache) -> Result<Self> {
        let gpu = KnownGpu::named(name)?;
        Library::Nvrtc.require()?;
        Ok(Self {
            device: DeviceSpec::new(gpu.capability, gpu.sm_count),
            compiler: Compiler::new(gpu.capability, cache)?,
            properties: properties(gpu.name, gpu.memory.unwrap_or(0)),
            built: Mutex::default(),
        })
    }

    fn build(&self, spec: &KernelSpec) -> Result<()> {
        let mut built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = built.entry(spec.clone()).or_default().clone();
        drop(built);
        slot.get_or_init(|| self.compiler.build(spec).map(drop)).clone()
    }

    fn absent(&self) -> Error {
        let message = format!(
            "{} is not present: its kernels can be compiled, but nothing can run",
            self.properties.name
        );
        Error::new(Code::Unavailable, message)
    }
}

impl Device for OfflineDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.properties
    }

    fn memory(&self) -> MemoryUse {
        let total = self.properties.memory_bytes;
        MemoryUse { used: 0, free: (total > 0).then(|| reserved(total)) }
    }

    fn allocate(&self, _: usize, _: MemoryKind) -> Result<Arc<dyn Buffer>> {
        Err(self.absent())
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        Err(self.absent())
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        Err(self.absent())
    }

    fn kernels(&self) -> &dyn Kernels {
        self
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        Some(self)
    }
}

impl Kernels for OfflineDevice {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        Ok(support(call, &self.device))
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        weight::packed_layout(weight)
    }

    fn prepack(
        &self,
        _: &mut dyn Stream,
        _: &WeightDesc,
        _: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        Err(self.absent())
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        let plan = ops::plan(call, &self.device)?;
        // Every step copies its inputs with this kernel, which belongs to no plan.
        self.build(&copy_kernel())?;
        plan.kernels.iter().try_for_each(|spec| self.build(spec))?;
        Ok(Arc::new(OfflinePlan { workspace: plan.workspace, absent: self.absent() }))
    }
}

impl Graphs for OfflineDevice {
    fn capture(&self, _: &mut dyn Stream, _: Vec<Box<dyn BoundCall>>) -> Result<Box<dyn Graph>> {
        Err(self.absent())
    }
}

/// A plan for an offline device.
#[derive(Debug)]
struct OfflinePlan {
    workspace: usize,
    absent: Error,
}

impl Plan for OfflinePlan {
    fn workspace_bytes(&self) -> usize {
        self.workspace
    }

    fn bind(self: Arc<Self>, _: ValidArguments<'_>) -> Result<Box<dyn BoundCall>> {
        Err(self.absent.clone())
    }
}
