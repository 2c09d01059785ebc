//! Capturing bound calls as a CUDA graph, which replays with one launch.

use crate::{
    context::{Context, Raw},
    stream::CudaStream,
};
use cudarc::driver::sys::{self, CUgraph, CUgraphExec};
use dsrun_core::{
    Result,
    device::Stream,
    graph::{Graph, Graphs},
    kernels::BoundCall,
};
use std::{ptr, sync::Arc};

/// Captures on streams of a handle.
#[derive(Debug)]
pub(crate) struct CudaGraphs {
    pub(crate) context: Arc<Context>,
}

impl Graphs for CudaGraphs {
    fn capture(&self, stream: &mut dyn Stream, calls: Vec<Box<dyn BoundCall>>) -> Result<Box<dyn Graph>> {
        let raw = CudaStream::own(stream, &self.context)?.raw;
        let context = &self.context;
        context.enter()?;
        // A free on another thread would record an event on the captured stream, and so become part of the capture. It
        // waits for this lock. Mode thread-local: what other threads do otherwise does not matter.
        let locked = context.streams();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live and not captured yet.
        context.check(unsafe { sys::cuStreamBeginCapture_v2(raw.0, mode) }, "beginning a capture")?;
        let enqueued = calls.iter().try_for_each(|call| call.enqueue(stream));
        let mut graph: CUgraph = ptr::null_mut();
        // SAFETY: the stream is being captured by this thread; the pointer is to a place of the right type.
        let ended = unsafe { sys::cuStreamEndCapture(raw.0, &raw mut graph) };
        drop(locked);
        let graph = Captured(graph);
        enqueued?;
        context.check(ended, "ending a capture")?;
        let mut executable: CUgraphExec = ptr::null_mut();
        // SAFETY: the graph was just made.
        let status = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut executable, graph.0, 0) };
        context.check(status, "making a graph of a capture")?;
        Ok(Box::new(CudaGraph { context: context.clone(), raw: Raw(executable), _calls: calls }))
    }
}

/// A graph before it is made executable.
struct Captured(CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the graph is live and owned here.
            unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// Captured calls, and what keeps their memory alive.
#[derive(Debug)]
struct CudaGraph {
    context: Arc<Context>,
    raw: Raw<sys::CUgraphExec_st>,
    _calls: Vec<Box<dyn BoundCall>>,
}

// SAFETY: a graph is used by one thread at a time, and the calls in it are not touched but for keeping them alive; every
// `BoundCall` may be dropped on any thread, as it is `Send`.
unsafe impl Send for CudaGraph {}

impl Graph for CudaGraph {
    fn launch(&self, stream: &mut dyn Stream) -> Result<()> {
        let stream = CudaStream::own(stream, &self.context)?;
        self.context.enter()?;
        stream.remember("a captured graph");
        // SAFETY: graph and stream are live.
        self.context.check(unsafe { sys::cuGraphLaunch(self.raw.0, stream.raw.0) }, "launching a graph")
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.context.enter_anyway().is_ok() {
            // SAFETY: the graph is live and used no more; the driver keeps what is still running.
            unsafe { sys::cuGraphExecDestroy(self.raw.0) };
        }
    }
}
