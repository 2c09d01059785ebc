//! The plan of a call: its kernels, its memory, and the function that makes its launches when it is bound.

use crate::{
    driver::{
        context::Context,
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp},
    },
    ops::frame::Frame,
};
use dsrun_core::{Error, Result};
use std::sync::Arc;

/// Makes the launches of a bound call. The functions are those of the plan's kernels, in order.
pub(crate) type MakeLaunches =
    Box<dyn Fn(&Frame, &[Arc<Function>], &Context) -> Result<Vec<LaunchOp>> + Send + Sync>;

/// The plan of a call.
pub(crate) struct KernelPlan {
    pub(crate) kernels: Vec<KernelSpec>,
    /// Bytes of scratch memory, which calls of a stream may share.
    pub(crate) workspace: usize,
    /// Bytes of zeroed memory of each bound call.
    pub(crate) persistent: usize,
    pub(crate) batch_invariant: bool,
    pub(crate) launches: MakeLaunches,
}

impl KernelPlan {
    /// A plan of one kernel without scratch memory.
    pub(crate) fn of_one(
        spec: KernelSpec,
        launch: impl Fn(&Frame, &Arc<Function>) -> Result<Option<LaunchOp>> + Send + Sync + 'static,
    ) -> Self {
        let launches: MakeLaunches =
            Box::new(move |frame, functions, _| Ok(launch(frame, only(functions)?)?.into_iter().collect()));
        Self::of(vec![spec], launches)
    }

    /// A plan without scratch or persistent memory.
    pub(crate) fn of(kernels: Vec<KernelSpec>, launches: MakeLaunches) -> Self {
        Self { kernels, workspace: 0, persistent: 0, batch_invariant: true, launches }
    }

    /// A plan without launches.
    pub(crate) fn nothing() -> Self {
        let launches: MakeLaunches = Box::new(|_, _, _| Ok(Vec::new()));
        Self::of(Vec::new(), launches)
    }
}

/// The function of a plan of one kernel.
pub(super) fn only(functions: &[Arc<Function>]) -> Result<&Arc<Function>> {
    functions.first().ok_or_else(|| Error::internal("a kernel plan without a kernel"))
}
