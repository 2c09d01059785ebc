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
        let key = plan_key(desc);
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

/// What tells descriptions apart that are planned differently. They have no order or hash of their own (attributes are
/// floats); their debug text tells all of them.
pub(crate) fn plan_key(desc: &CallDesc) -> String {
    format!("{} {:?} {:?} {:?}", desc.op, desc.operands, desc.results, desc.comm)
}
