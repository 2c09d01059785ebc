//! Compiles steps before requests need them.

use super::Runner;
use crate::{error::Result, plan::Bucket};

impl Runner {
    /// Compiles the steps of every size that requests may need and launches each once with extents of 0, so that no request waits
    /// for a step to be compiled or for a kernel to be loaded. `progress` receives the number of steps that are ready.
    ///
    /// # Errors
    /// If requests are running, or the device failed.
    pub(crate) fn warm_up(&mut self, progress: &mut dyn FnMut(usize)) -> Result<()> {
        self.check_idle()?;
        let buckets = self.buckets();
        // A step that needs more shared memory causes all compiled steps to be dropped, which are then compiled again.
        loop {
            let mut missing = buckets.iter().filter(|bucket| !self.executor.has_step(**bucket));
            let (count, next) = (missing.clone().count(), missing.next_back().copied());
            progress(buckets.len() - count);
            match next {
                Some(bucket) => self.executor.launch_empty(bucket)?,
                None => break,
            }
        }
        self.count();
        Ok(())
    }

    /// The buckets that steps may have.
    pub(crate) fn buckets(&self) -> Vec<Bucket> {
        let plan = self.plan();
        let limits = Bucket { tokens: self.requests.scheduler().capacity().tokens, ..plan.limits };
        Bucket::all(limits, plan.options.rows_per_request())
    }
}
