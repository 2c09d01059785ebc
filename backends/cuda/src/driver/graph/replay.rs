//! Launches a captured graph, together with the copy to the host that follows it.
//!
//! After a step, a few words of results are copied to pinned memory by a kernel. As a separate launch it would start microseconds
//! after the graph; as a node of the graph it costs almost nothing. So a stream delays the launch of a short graph until the next
//! command. If that is such a copy, a graph that includes it is launched instead. That graph is captured when the same
//! destination occurs for the second time, and kept, since steps in flight use few destinations.

use crate::driver::{
    context::Context,
    graph::{Captured, Contents},
    launch::LaunchOp,
    raw::{Raw, RawStream},
    stream::CudaStream,
};
use cudarc::driver::sys::{self, CUgraphExec};
use dsrun_core::Result;
use std::{
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

/// The maximum number of nodes of a short graph, which takes microseconds to capture again.
const SHORT: usize = 16;
/// The maximum number of variants of a graph with a copy.
const MOST_COPIES: usize = 4;

/// A copy of a few words between pinned host memory and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FewWords {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: usize,
}

/// Captured calls, ready to launch.
#[derive(Debug)]
pub(crate) struct Replay {
    contents: Contents,
    alone: Executable,
    short: bool,
    /// Variants of the graph that end with a copy; `None` for a copy that has occurred only once.
    with_copies: Mutex<Vec<(FewWords, Option<Executable>)>>,
}

// SAFETY: the calls among the contents are not touched but for keeping their memory alive, and every `BoundCall` may be dropped on
// any thread, as it is `Send`; launches, which capturing enqueues, are plain data; the driver synchronises the use of its handles.
unsafe impl Send for Replay {}
// SAFETY: as above.
unsafe impl Sync for Replay {}

impl Replay {
    pub(super) fn new(contents: Contents, captured: &Captured) -> Result<Self> {
        let alone = Executable::new(&contents.context, captured)?;
        // Other ranks wait for collectives, so graphs with collectives are not delayed.
        let alone_on_device = contents.gatherings.is_empty();
        let short = alone_on_device && captured.nodes().is_some_and(|nodes| nodes.len() <= SHORT);
        Ok(Self { contents, alone, short, with_copies: Mutex::default() })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.contents.context
    }

    /// Whether to delay the launch until the next command.
    pub(crate) fn is_short(&self) -> bool {
        self.short
    }

    pub(crate) fn launch(&self, stream: &mut CudaStream) -> Result<()> {
        stream.gathered(&self.contents.gatherings, |stream| self.alone.launch(stream.raw))
    }

    /// Launches the variant of the graph that ends with this copy. Returns false if there is no such variant.
    pub(crate) fn launch_with(
        &self,
        stream: &mut CudaStream,
        copy: FewWords,
        step: &LaunchOp,
    ) -> Result<bool> {
        let mut copies = self.with_copies.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(index) = copies.iter().position(|(other, _)| *other == copy) else {
            if copies.len() < MOST_COPIES {
                copies.push((copy, None));
            }
            return Ok(false);
        };
        let executable = match &copies[index].1 {
            Some(executable) => executable,
            None => {
                let captured = self.contents.capture(stream, Some(step))?;
                copies[index].1.insert(Executable::new(self.context(), &captured)?)
            }
        };
        executable.launch(stream.raw).map(|()| true)
    }
}

/// An instantiated graph.
#[derive(Debug)]
struct Executable {
    context: Arc<Context>,
    raw: Raw<sys::CUgraphExec_st>,
}

impl Executable {
    fn new(context: &Arc<Context>, captured: &Captured) -> Result<Self> {
        let mut raw: CUgraphExec = ptr::null_mut();
        // SAFETY: the graph was just made.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut raw, captured.0, 0) };
        context.check(status, "making a graph of a capture")?;
        Ok(Self { context: context.clone(), raw: Raw(raw) })
    }

    fn launch(&self, stream: RawStream) -> Result<()> {
        self.context.enter()?;
        self.context.recent.note("a captured graph");
        // SAFETY: graph and stream are live.
        self.context.check(unsafe { sys::cuGraphLaunch(self.raw.0, stream.0) }, "launching a graph")
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        if self.context.enter_anyway().is_ok() {
            // SAFETY: the graph is live and used no more; the driver keeps what is still running.
            unsafe { sys::cuGraphExecDestroy(self.raw.0) };
        }
    }
}
