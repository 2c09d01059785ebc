//! A test device that admits all regions and runs their bodies op by op, so that a fused program computes exactly the values of
//! the primitives.

use super::device;
use dsrun_core::{
    Result,
    checked::{CheckedPlan, ValidCall},
    device::Device,
    kernels::{Plan, Support},
    lowered_region::LoweredPlan,
    op::Op,
};
use dsrun_test_support::{Front, FrontDevice};
use std::sync::{Arc, Mutex};

/// The reference device with support for regions.
#[derive(Debug)]
pub(crate) struct LoweringDevice {
    inner: Arc<dyn Device>,
    /// The names of the planned regions.
    planned: Mutex<Vec<String>>,
}

impl LoweringDevice {
    pub(crate) fn open() -> Arc<FrontDevice<Self>> {
        Arc::new(FrontDevice(Self { inner: device(), planned: Mutex::default() }))
    }

    /// The names of the planned regions in order.
    pub(crate) fn planned(&self) -> Vec<String> {
        self.planned.lock().expect("no test panicked").clone()
    }
}

impl LoweringDevice {
    fn lower(&self, call: &ValidCall) -> Result<LoweredPlan> {
        LoweredPlan::new(call, 256, &mut |call| CheckedPlan::new(&*self.inner, call))
    }
}

impl Front for LoweringDevice {
    fn behind(&self) -> &dyn Device {
        &*self.inner
    }

    fn query(&self, call: &ValidCall) -> Result<Support> {
        let Op::Region(_) = &call.op else { return self.inner.kernels().query(call) };
        Ok(Support { workspace_bytes: self.lower(call)?.workspace_bytes(), ..Support::native() })
    }

    fn plan(&self, call: &ValidCall) -> Result<Arc<dyn Plan>> {
        let Op::Region(region) = &call.op else { return self.inner.kernels().plan(call) };
        self.planned.lock().expect("no test panicked").push(region.name().to_owned());
        Ok(Arc::new(self.lower(call)?))
    }
}
