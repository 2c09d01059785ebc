//! Compiling steps before requests need them.

use super::step::RUNS;
use crate::engine::{Engine, STEP_TIMEOUT};
use crate::{error::Result, plan::Bucket, runner::inputs::StepInputs};
use dsrun_core::{Code, Error};

impl Engine {
    /// Compiles the steps of every size that requests may need, those of a second model too, and launches each once with nothing
    /// in it: so that no request waits for a step to be compiled, and no kernel is brought to the device while others run.
    /// `progress` hears of the steps that are ready, and of all. Gives their number.
    ///
    /// [`EnginePlan::prepare`](crate::EnginePlan::prepare), called before, builds what a backend keeps by several threads; here it
    /// is one after the other.
    ///
    /// # Errors
    /// If requests are running, or the device failed.
    pub fn warm_up(&mut self, progress: &mut dyn FnMut(usize, usize)) -> Result<usize> {
        if !self.is_idle() {
            return Err(Error::new(Code::FailedPrecondition, "requests are running").into());
        }
        let buckets = self.buckets();
        let drafts = self.draft().map_or(0, |draft| draft.buckets().len());
        let (own, total) = (buckets.len(), buckets.len() + drafts);
        // A step that needs more of the shared memory than those before it has them compiled once more.
        loop {
            let mut missing = buckets.iter().filter(|bucket| !self.steps.contains_key(bucket));
            let (count, next) = (missing.clone().count(), missing.next_back().copied());
            progress(own - count, total);
            match next {
                Some(bucket) => self.launch_empty(bucket)?,
                None => break,
            }
        }
        if let Some(drafter) = &mut self.drafter {
            drafter.engine_mut().warm_up(&mut |done, _| progress(own + done, total))?;
        }
        Ok(total)
    }

    /// Those that steps may have.
    fn buckets(&self) -> Vec<Bucket> {
        let limits = Bucket { tokens: self.step_tokens(), ..self.plan.limits };
        Bucket::all(limits, self.plan.options.rows_per_request())
    }

    /// Launches everything of a step. Its extents are 0, so it touches nothing of any request.
    pub(crate) fn launch_empty(&mut self, bucket: Bucket) -> Result<()> {
        self.begin_as(bucket, &StepInputs::default())?;
        RUNS.iter().try_for_each(|segments| self.run(bucket, segments))?;
        Ok(self.stream.synchronize("a step that warms up", STEP_TIMEOUT)?)
    }
}
