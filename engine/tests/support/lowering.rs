//! A test device that admits all regions and runs their bodies op by op, so that a fused program computes exactly the values of
//! the primitives.

use super::device;
use dsrun_core::{
    Result, WeightReader,
    checked::{CheckedPlan, ValidCall},
    device::{Buffer, Device, DeviceProperties, Event, MemoryKind, MemoryUse, Stream},
    kernels::{Kernels, PackedLayout, PackedWeight, Plan, Support, WeightDesc},
    lowered_region::LoweredPlan,
    op::Op,
};
use std::sync::{Arc, Mutex};

/// The reference device with support for regions.
#[derive(Debug)]
pub(crate) struct LoweringDevice {
    inner: Arc<dyn Device>,
    /// The names of the planned regions.
    planned: Mutex<Vec<String>>,
}

impl LoweringDevice {
    pub(crate) fn open() -> Arc<Self> {
        Arc::new(Self { inner: device(), planned: Mutex::default() })
    }

    /// The names of the planned regions in order.
    pub(crate) fn planned(&self) -> Vec<String> {
        self.planned.lock().expect("no test panicked").clone()
    }
}

impl Device for LoweringDevice {
    fn properties(&self) -> &DeviceProperties {
        self.inner.properties()
    }

    fn memory(&self) -> MemoryUse {
        self.inner.memory()
    }

    fn allocate(&self, bytes: usize, kind: MemoryKind) -> Result<Arc<dyn Buffer>> {
        self.inner.allocate(bytes, kind)
    }

    fn stream(&self) -> Result<Box<dyn Stream>> {
        self.inner.stream()
    }

    fn event(&self) -> Result<Arc<dyn Event>> {
        self.inner.event()
    }

    fn kernels(&self) -> &dyn Kernels {
        self
    }
}

impl LoweringDevice {
    fn lower(&self, call: &ValidCall) -> Result<LoweredPlan> {
        LoweredPlan::new(call, 256, &mut |call| CheckedPlan::new(&*self.inner, call))
    }
}

impl Kernels for LoweringDevice {
    fn query(&self, call: &ValidCall) -> Result<Support> {
        let Op::Region(_) = &call.op else { return self.inner.kernels().query(call) };
        Ok(Support { workspace_bytes: self.lower(call)?.workspace_bytes(), ..Support::native() })
    }

    fn prepack_query(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        self.inner.kernels().prepack_query(weight)
    }

    fn prepack(
        &self,
        stream: &mut dyn Stream,
        weight: &WeightDesc,
        rows: &mut dyn WeightReader,
    ) -> Result<Arc<dyn PackedWeight>> {
        self.inner.kernels().prepack(stream, weight, rows)
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        let Op::Region(region) = &call.op else { return self.inner.kernels().plan(call) };
        self.planned.lock().expect("no test panicked").push(region.name().to_owned());
        Ok(Arc::new(self.lower(call)?))
    }
}
