//! Graphs: lists of calls that run inside the thread pool of the device.
//!
//! A call that needs threads enters the pool, which costs a few microseconds; a decode step has hundreds of such calls. A
//! captured list enters it once.

use crate::{host::Host, stream::HostStream};
use dsrun_core::{
    Result,
    device::Stream,
    graph::{Graph, Graphs},
    kernels::BoundCall,
};
use std::sync::{Arc, Mutex, PoisonError};

/// Captures lists of calls for a device.
#[derive(Debug)]
pub(crate) struct HostGraphs {
    host: Arc<Host>,
}

impl HostGraphs {
    pub(crate) fn new(host: Arc<Host>) -> Self {
        Self { host }
    }
}

impl Graphs for HostGraphs {
    fn capture(&self, stream: &mut dyn Stream, calls: Vec<Box<dyn BoundCall>>) -> Result<Box<dyn Graph>> {
        HostStream::check(stream, &self.host)?;
        Ok(Box::new(HostGraph { host: self.host.clone(), calls: Mutex::new(calls) }))
    }
}

/// A list of calls. The mutex lets a thread of the pool borrow them; nothing else ever locks it.
#[derive(Debug)]
struct HostGraph {
    host: Arc<Host>,
    calls: Mutex<Vec<Box<dyn BoundCall>>>,
}

impl Graph for HostGraph {
    fn launch(&self, stream: &mut dyn Stream) -> Result<()> {
        HostStream::check(stream, &self.host)?;
        self.host.pool.install(|| {
            let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            calls.iter().try_for_each(|call| call.enqueue(stream))
        })
    }
}
