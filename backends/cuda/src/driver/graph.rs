//! Captures bound calls as a CUDA graph, which is replayed with one launch.

mod replay;

pub(crate) use replay::{FewWords, Replay};

use crate::driver::{
    context::Context,
    launch::{LaunchOp, Launches},
    rendezvous::Gatherings,
    stream::CudaStream,
};
use cudarc::driver::sys::{self, CUgraph, CUresult};
use dsrun_core::{
    Result,
    device::Stream,
    graph::{Graph, Graphs},
    kernels::BoundCall,
};
use std::{ffi::CStr, ptr, sync::Arc};

/// The first driver that reports the names of kernels: 12.3.
const NAMING_DRIVER: i32 = 12_030;

/// The longest repeated sequence of launches that is searched for: more than a layer has.
const LONGEST_RUN: usize = 48;

/// Captures graphs on the streams of a handle.
#[derive(Debug)]
pub(crate) struct CudaGraphs {
    pub(crate) context: Arc<Context>,
}

impl Graphs for CudaGraphs {
    fn capture(&self, stream: &mut dyn Stream, calls: Vec<Box<dyn BoundCall>>) -> Result<Box<dyn Graph>> {
        let context = &self.context;
        context.enter()?;
        let stream = CudaStream::own(stream, context)?;
        let launches = record(stream, &calls)?;
        let mut gatherings = Gatherings::default();
        launches
            .iter()
            .filter_map(|launches| launches.rendezvous.as_ref())
            .for_each(|one| gatherings.add(one));
        let contents = Contents { context: context.clone(), launches, gatherings, _calls: calls };
        let captured = contents.capture(stream, None)?;
        if tracing::enabled!(tracing::Level::DEBUG) && context.driver >= NAMING_DRIVER {
            let launches = captured.launches().map(|names| counted(&names)).unwrap_or_default();
            tracing::debug!(calls = contents._calls.len(), "captured a graph, launches in order: {launches}");
        }
        Ok(Box::new(CudaGraph(Arc::new(Replay::new(contents, &captured)?))))
    }
}

/// Records the launches of the calls instead of enqueuing them.
fn record(stream: &mut CudaStream, calls: &[Box<dyn BoundCall>]) -> Result<Vec<Launches>> {
    stream.recorded = Some(Vec::new());
    let enqueued = calls.iter().try_for_each(|call| call.enqueue(stream));
    let recorded = stream.recorded.take();
    enqueued.map(|()| recorded.unwrap_or_default())
}

/// The launches of a graph, and the objects that keep its memory alive.
#[derive(Debug)]
struct Contents {
    context: Arc<Context>,
    launches: Vec<Launches>,
    /// The collectives among the calls.
    gatherings: Gatherings,
    _calls: Vec<Box<dyn BoundCall>>,
}

impl Contents {
    /// Captures all launches on a stream, followed by one more if given.
    fn capture(&self, stream: &mut CudaStream, last: Option<&LaunchOp>) -> Result<Captured> {
        let (context, raw) = (&self.context, stream.raw);
        // A free on another thread would record an event on the captured stream and so become part of the capture;
        // this lock prevents that. With thread-local mode, other calls of other threads do not affect the capture.
        let locked = context.streams();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live and not captured yet.
        context.check(unsafe { sys::cuStreamBeginCapture_v2(raw.0, mode) }, "beginning a capture")?;
        let enqueued = self.launches.iter().try_for_each(|launches| launches.enqueue(context, stream));
        let enqueued = enqueued.and_then(|()| last.map_or(Ok(()), |launch| launch.enqueue(context, stream)));
        let mut graph: CUgraph = ptr::null_mut();
        // SAFETY: the stream is being captured by this thread; the pointer is to a place of the right type.
        let ended = unsafe { sys::cuStreamEndCapture(raw.0, &raw mut graph) };
        drop(locked);
        let graph = Captured(graph);
        enqueued?;
        context.check(ended, "ending a capture")?;
        Ok(graph)
    }
}

/// A captured graph before it is instantiated.
struct Captured(CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the graph is live and owned here.
            unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

impl Captured {
    /// All nodes, in order; `None` if the driver cannot report them.
    fn nodes(&self) -> Option<Vec<sys::CUgraphNode>> {
        let mut count = 0;
        // SAFETY: the graph is live; without a place for nodes the driver counts them.
        let counted = unsafe { sys::cuGraphGetNodes(self.0, ptr::null_mut(), &raw mut count) };
        let mut nodes = vec![ptr::null_mut(); count];
        // SAFETY: there is room for `count` nodes.
        let listed = unsafe { sys::cuGraphGetNodes(self.0, nodes.as_mut_ptr(), &raw mut count) };
        let known = [counted, listed] == [CUresult::CUDA_SUCCESS; 2];
        nodes.truncate(count);
        known.then_some(nodes)
    }

    /// The names of the graph's kernels in order, with `copy` or `fill` for other nodes; `None` if the driver cannot report them.
    fn launches(&self) -> Option<Vec<String>> {
        Some(self.nodes()?.into_iter().map(name_of).collect())
    }
}

/// The name of a graph node.
fn name_of(node: sys::CUgraphNode) -> String {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: the node belongs to a live graph; plain data for which zero is a valid value in every field; the pointers are to places
    // of the right type.
    let name = unsafe {
        sys::cuGraphNodeGetType(node, &raw mut kind);
        if kind != sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL {
            return format!("{kind:?}").trim_start_matches("CU_GRAPH_NODE_TYPE_").to_lowercase();
        }
        let (mut parameters, mut name): (sys::CUDA_KERNEL_NODE_PARAMS, _) = (std::mem::zeroed(), ptr::null());
        sys::cuGraphKernelNodeGetParams_v2(node, &raw mut parameters);
        // Kernels of a library that belongs to no context, such as cuBLASLt's, have no function.
        let status = match (parameters.func.is_null(), parameters.kern.is_null()) {
            (false, _) => sys::cuFuncGetName(&raw mut name, parameters.func),
            (true, false) => sys::cuKernelGetName(&raw mut name, parameters.kern),
            _ => CUresult::CUDA_ERROR_NOT_FOUND,
        };
        if status != CUresult::CUDA_SUCCESS || name.is_null() {
            return "unnamed".to_owned();
        }
        CStr::from_ptr(name)
    };
    name.to_string_lossy().into_owned()
}

/// Formats names in order; a repeated sequence is written once, with its count.
fn counted(names: &[String]) -> String {
    let mut text = String::new();
    let mut rest = names;
    while !rest.is_empty() {
        // The shortest sequence whose repetitions cover the most names.
        let repeats =
            |length: usize| rest.chunks(length).take_while(|chunk| *chunk == &rest[..length]).count();
        let (length, times) = (1..=rest.len().min(LONGEST_RUN))
            .map(|length| (length, repeats(length)))
            .filter(|(_, times)| *times > 1)
            .max_by_key(|(length, times)| (length * times, usize::MAX - length))
            .unwrap_or((1, 1));
        let run = rest[..length].join(", ");
        let separator = if text.is_empty() { "" } else { ", " };
        text += &match times {
            1 => format!("{separator}{run}"),
            _ => format!("{separator}{times} x ({run})"),
        };
        rest = &rest[length * times..];
    }
    text
}

/// Captured calls.
#[derive(Debug)]
struct CudaGraph(Arc<Replay>);

impl Graph for CudaGraph {
    fn launch(&self, stream: &mut dyn Stream) -> Result<()> {
        CudaStream::own(stream, self.0.context())?.launch(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn launches_that_repeat_are_written_once() {
        let names = |text: &str| -> Vec<String> { text.split(' ').map(str::to_owned).collect() };
        assert_eq!(counted(&names("a b b b c")), "a, 3 x (b), c");
        assert_eq!(counted(&names("e x y x y x y h")), "e, 3 x (x, y), h");
        // A layer that launches the same kernel twice is one layer.
        assert_eq!(counted(&names("e x x y x x y h")), "e, 2 x (x, x, y), h");
        assert_eq!(counted(&[]), "");
    }
}
