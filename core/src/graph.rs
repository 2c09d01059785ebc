//! Capturing a sequence of bound calls once and replaying it.

use crate::{Result, checked::ValidCall, device::Stream, kernels::BoundCall};
use std::fmt::Debug;

/// Work that can be launched again and again. Everything that changes from step to step is device memory.
pub trait Graph: Send + Debug {
    /// Enqueues all of it.
    ///
    /// # Errors
    /// If the stream is another backend's, or a fault of the device is already known.
    fn launch(&self, stream: &mut dyn Stream) -> Result<()>;
}

/// Capturing work.
pub trait Graphs: Send + Sync {
    /// Captures the calls, in order, for replay on streams of this device. None of them runs.
    ///
    /// # Errors
    /// If a call is not safe to capture, or the device cannot hold the graph.
    fn capture(&self, stream: &mut dyn Stream, calls: Vec<Box<dyn BoundCall>>) -> Result<Box<dyn Graph>>;

    /// Builds ahead what a graph of such calls, in this order, would need beside what planning each of them builds: a device may
    /// run several calls of a graph as one. What comes of it is kept by the backend, as what planning builds is.
    ///
    /// # Errors
    /// Those of compilation.
    fn prepare(&self, calls: &[ValidCall]) -> Result<()> {
        let _ = calls;
        Ok(())
    }
}

/// What stands in for a graph on devices that have none: the list of calls.
#[derive(Debug)]
pub struct CallList {
    calls: Vec<Box<dyn BoundCall>>,
}

impl CallList {
    /// A list of calls.
    pub fn new(calls: Vec<Box<dyn BoundCall>>) -> Self {
        Self { calls }
    }
}

impl Graph for CallList {
    fn launch(&self, stream: &mut dyn Stream) -> Result<()> {
        self.calls.iter().try_for_each(|call| call.enqueue(stream))
    }
}
