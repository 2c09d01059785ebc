//! A device that is not here: its kernels are chosen and built, and nothing runs.

use crate::{
    compiler::{Cache, Compiler},
    device::{machine, properties, reserved},
    kernels::support,
    library::Library,
    ops::{self, layers, next_token, quantised},
    part::Part,
    spec::{KernelSpec, Machine},
    weight,
};
use dsrun_core::{
    Code, Error, Result, WeightReader,
    device::{Buffer, Device, DeviceProperties, Event, MemoryKind, MemoryUse, Stream},
    graph::{Graph, Graphs},
    kernels::{
        Arguments, BoundCall, CallDesc, Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc,
    },
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

/// The kernels that a graph of such calls needs beside those of each call, and those that copies need.
pub(crate) fn of_graph(calls: &[CallDesc], machine: &Machine) -> Vec<KernelSpec> {
    let mut kernels = layers::foreseen(calls, machine);
    kernels.extend(next_token::foreseen(calls));
    kernels.extend(quantised::foreseen(calls, machine));
    kernels.push(ops::copy_kernel());
    kernels
}

/// A device that is not here.
#[derive(Debug)]
pub(crate) struct AbsentDevice {
    properties: DeviceProperties,
    machine: Machine,
    compiler: Compiler,
    /// What was built, or why it was not. Who wants another kernel does not wait for one that is being built.
    built: Mutex<HashMap<KernelSpec, Arc<OnceLock<Result<()>>>>>,
}

impl AbsentDevice {
    /// A GPU by a name of [`Part::named`].
    ///
    /// # Errors
    /// If the name says too little, or NVRTC is missing or too old.
    pub(crate) fn open(name: &str, cache: Cache) -> Result<Self> {
        let part = Part::named(name)?;
        Library::Nvrtc.require()?;
        Ok(Self {
            machine: machine(part.capability, part.processors),
            compiler: Compiler::new(part.capability, cache)?,
            properties: properties(part.name, part.memory.unwrap_or(0)),
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
        let message =
            format!("{} is not here: its kernels can be built, and nothing can run", self.properties.name);
        Error::new(Code::Unavailable, message)
    }
}

impl Device for AbsentDevice {
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

impl Kernels for AbsentDevice {
    fn query(&self, call: &CallDesc) -> Result<Support> {
        Ok(support(call, &self.machine))
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

    fn plan(&self, call: &CallDesc) -> Result<Arc<dyn Plan>> {
        call.validate()?;
        let recipe = ops::recipe(call, &self.machine)?;
        recipe.kernels.iter().try_for_each(|spec| self.build(spec))?;
        Ok(Arc::new(AbsentPlan { workspace: recipe.workspace, absent: self.absent() }))
    }
}

impl Graphs for AbsentDevice {
    fn capture(&self, _: &mut dyn Stream, _: Vec<Box<dyn BoundCall>>) -> Result<Box<dyn Graph>> {
        Err(self.absent())
    }

    fn prepare(&self, calls: &[CallDesc]) -> Result<()> {
        of_graph(calls, &self.machine).iter().try_for_each(|spec| self.build(spec))
    }
}

/// A plan for a device that is not here.
#[derive(Debug)]
struct AbsentPlan {
    workspace: usize,
    absent: Error,
}

impl Plan for AbsentPlan {
    fn workspace_bytes(&self) -> usize {
        self.workspace
    }

    fn bind(self: Arc<Self>, _: &Arguments) -> Result<Box<dyn BoundCall>> {
        Err(self.absent.clone())
    }
}
