//! Checks that results do not depend on the rest of the batch, if the options ask for it.

use super::EnginePlan;
use crate::error::{EngineError, Result};
use dsrun_core::device::Device;
use std::collections::BTreeSet;

impl EnginePlan {
    /// Checks that the device guarantees batch invariance for every call of every step, if the options require it.
    ///
    /// # Errors
    /// If it does not guarantee this; the error names the ops.
    pub(super) fn check_batch_invariance(&self, device: &dyn Device) -> Result<()> {
        if !self.options.batch_invariant {
            return Ok(());
        }
        let mut dependent = BTreeSet::new();
        for call in self.distinct_calls(device)? {
            let support = device.kernels().query(&call)?;
            // Calls that the device cannot run at all are refused when they are planned.
            if support.native && !support.batch_invariant {
                dependent.insert(call.op.name().to_owned());
            }
        }
        if dependent.is_empty() {
            return Ok(());
        }
        let ops: Vec<String> = dependent.into_iter().collect();
        let rule = format!(
            "{} does not guarantee it: a row of {} may depend on the other rows of a step; leave the option out, or choose another \
             backend or dtype",
            device.properties().name,
            ops.join(", ")
        );
        Err(EngineError::option("batch-invariant", true, rule))
    }
}
