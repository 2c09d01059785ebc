//! Plans by description: layers with equal descriptions share one.

use crate::error::Result;
use dsrun_core::{checked::CheckedPlan, device::Device, kernels::CallDesc};
use std::collections::HashMap;

/// The plans made so far.
#[derive(Debug, Default)]
pub(crate) struct PlanCache {
    plans: HashMap<String, CheckedPlan>,
}

impl PlanCache {
    /// The plan for a description, made now if it is new.
    ///
    /// # Errors
    /// If the device refuses it.
    pub(crate) fn plan(&mut self, device: &dyn Device, desc: &CallDesc) -> Result<CheckedPlan> {
        // A description has no order or hash of its own (attributes are floats); its debug text tells all of it.
        let key = format!("{} {:?} {:?} {:?}", desc.op, desc.operands, desc.results, desc.comm);
        if let Some(plan) = self.plans.get(&key) {
            return Ok(plan.clone());
        }
        let plan = CheckedPlan::new(device, desc.clone())?;
        self.plans.insert(key, plan.clone());
        Ok(plan)
    }

    /// Distinct plans.
    pub(crate) fn len(&self) -> usize {
        self.plans.len()
    }
}
