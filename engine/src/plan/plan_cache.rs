//! Kernel plans by description: layers with equal descriptions share one plan.

use crate::error::Result;
use dsrun_core::{
    checked::{CheckedPlan, ValidCall},
    device::Device,
    kernels::CallDesc,
};
use std::{collections::HashMap, sync::Arc};

/// The kernel plans made so far.
#[derive(Debug, Default)]
pub(crate) struct PlanCache {
    plans: HashMap<String, CheckedPlan>,
}

impl PlanCache {
    /// The plan for a description. The first time, the device makes it.
    ///
    /// # Errors
    /// If the device refuses the description.
    pub(crate) fn plan(&mut self, device: &dyn Device, desc: &ValidCall) -> Result<CheckedPlan> {
        let key = plan_key(desc);
        if let Some(plan) = self.plans.get(&key) {
            return Ok(plan.clone());
        }
        let plan = CheckedPlan::new(device, desc.clone())?;
        self.plans.insert(key, plan.clone());
        Ok(plan)
    }

    /// The number of distinct plans.
    pub(crate) fn len(&self) -> usize {
        self.plans.len()
    }
}

/// A cache key of a description. Descriptions implement neither `Hash` nor `Ord` (attributes contain floats), but their debug
/// output shows every field.
pub(crate) fn plan_key(desc: &CallDesc) -> String {
    // A communicator is identified by its address: it has no name, and its debug output changes while it runs.
    let group = desc.comm.as_ref().map(Arc::as_ptr);
    format!("{} {:?} {:?} {group:?}", desc.op, desc.operands, desc.results)
}
