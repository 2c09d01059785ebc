//! Capturing a sequence of bound calls once and replaying it.

use crate::{Result, device::Stream, kernels::BoundCall};
use std::fmt::Debug;

/// Captured work that can be launched again and again. Whatever changes from step to step is in device memory.
pub trait Graph: Send + Debug {
    /// Enqueues all captured calls.
    ///
    /// # Errors
    /// If the stream belongs to another backend, or the device is known to have failed.
    fn launch(&self, stream: &mut dyn Stream) -> Result<()>;
}

/// Graph capture of a device.
pub trait Graphs: Send + Sync {
    /// Captures the calls, in order, for replay on streams of this device. Capturing runs no call.
    ///
    /// # Errors
    /// If a call is not safe to capture, or the device cannot hold the graph.
    fn capture(&self, stream: &mut dyn Stream, calls: Vec<Box<dyn BoundCall>>) -> Result<Box<dyn Graph>>;
}

/// The replacement for a graph on devices without capture: a list of bound calls.
#[derive(Debug)]
pub struct CallList {
    calls: Vec<Box<dyn BoundCall>>,
}

impl CallList {
    /// A list of calls, launched in order.
    pub fn new(calls: Vec<Box<dyn BoundCall>>) -> Self {
        Self { calls }
    }
}

impl Graph for CallList {
    fn launch(&self, stream: &mut dyn Stream) -> Result<()> {
        self.calls.iter().try_for_each(|call| call.enqueue(stream))
    }
}
