//! The trait of the kernels.
//!
//! An op's own attribute struct is its kernel: `impl Kernel for RmsNorm` runs it on the CPU. Shapes come with the bound tensors,
//! so a plan holds nothing else.

use crate::parallel::Worker;
use dsrun_core::Result;
use dsrun_host::Frame;
use std::fmt::Debug;

/// An op prepared to run.
pub(crate) trait Kernel: Debug + Send + Sync {
    /// Runs the op once.
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()>;
}
