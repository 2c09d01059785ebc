//! Exclusive use of the device, while no request runs.

use super::{Runner, request_table::TableRow};
use crate::{
    error::{EngineError, Result},
    sampling::SamplingOptions,
};
use dsrun_core::{Code, Error};

impl Runner {
    /// Checks that no request waits or runs.
    ///
    /// # Errors
    /// If there is one.
    pub(crate) fn check_idle(&self) -> Result<()> {
        if self.is_idle() {
            return Ok(());
        }
        let scheduler = self.requests.scheduler();
        let (running, waiting) = (scheduler.running(), scheduler.waiting());
        let message =
            format!("{running} requests run and {waiting} wait: this is only possible while there are none");
        Err(Error::new(Code::FailedPrecondition, message).into())
    }

    /// Runs `work` with pages for this many tokens, which are returned afterwards.
    ///
    /// # Errors
    /// If requests wait or run, there are fewer pages, or the model is an encoder; those of `work`.
    pub(crate) fn with_pages<T>(
        &mut self,
        tokens: usize,
        work: impl FnOnce(&mut Self, &[i32]) -> Result<T>,
    ) -> Result<T> {
        self.check_idle()?;
        self.limits().check_generates()?;
        let block = self.plan().options.block_size;
        let pages = self.requests.scheduler_mut().pages_mut().take_many(tokens.div_ceil(block));
        let context = self.requests.scheduler().pages().total() * block;
        let pages = pages.ok_or(EngineError::PromptTooLong { tokens, context })?;
        // Before these pages are written to.
        self.save_pages()?;
        let done = work(self, &pages);
        self.requests.scheduler_mut().pages_mut().release(pages.into_iter());
        done
    }

    /// Sets a row of the request table: a request of `length` tokens with these pages.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn place_alone(&mut self, slot: usize, length: usize, pages: &[i32]) -> Result<()> {
        self.table.place(slot, TableRow { length, pages, sampling: &SamplingOptions::default() });
        self.table.upload(&mut self.executor)
    }
}
