//! Launching a captured graph, and with it a copy to the host behind it.
//!
//! Epilogue a step, a few words of results are copied into pinned memory. That is a kernel, which begins microseconds after the graph
//! has ended, where within the graph it is one more node. So a stream puts the launch of a short graph off until it is told what comes
//! next. If that is such a copy, a graph with it is launched instead: made when a place is met again, and kept, as results of steps in
//! flight go to few places.

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

/// The most nodes of a short graph: capturing it again takes microseconds.
const SHORT: usize = 16;
/// The most copies that a graph is made with.
const MOST_COPIES: usize = 4;

/// A copy of a few words between pinned memory and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FewWords {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: usize,
}

/// Captured calls that can be launched.
#[derive(Debug)]
pub(crate) struct Replay {
    contents: Contents,
    alone: Executable,
    short: bool,
    /// Graphs with a copy behind the calls; none yet where the copy was met once.
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
        // Other ranks wait for collectives, so those are not put off.
        let alone_on_device = contents.gatherings.is_empty();
        let short = alone_on_device && captured.nodes().is_some_and(|nodes| nodes.len() <= SHORT);
        Ok(Self { contents, alone, short, with_copies: Mutex::default() })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.contents.context
    }

    /// Whether it is worth waiting for what comes behind it.
    pub(crate) fn is_short(&self) -> bool {
        self.short
    }

    pub(crate) fn launch(&self, stream: &mut CudaStream) -> Result<()> {
        stream.gathered(&self.contents.gatherings, |stream| self.alone.launch(stream.raw))
    }

    /// Launches the graph with a copy behind it, which a step does; whether it did.
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

/// A graph that the driver can launch.
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
