//! Calls that run one after the other without leaving the device's threads.
//!
//! A call that wants threads enters the pool, which costs a few microseconds; a decode step has hundreds of such calls. A
//! captured list enters it once.

use crate::{device::Core, stream::HostStream};
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
    core: Arc<Core>,
}

impl HostGraphs {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self { core }
    }
}

impl Graphs for HostGraphs {
    fn capture(&self, stream: &mut dyn Stream, calls: Vec<Box<dyn BoundCall>>) -> Result<Box<dyn Graph>> {
        HostStream::check(stream, &self.core)?;
        Ok(Box::new(HostGraph { core: self.core.clone(), calls: Mutex::new(calls) }))
    }
}

/// A list of calls. The mutex is what lets the pool's thread borrow them; nobody else wants it.
#[derive(Debug)]
struct HostGraph {
    core: Arc<Core>,
    calls: Mutex<Vec<Box<dyn BoundCall>>>,
}

impl Graph for HostGraph {
    fn launch(&self, stream: &mut dyn Stream) -> Result<()> {
        HostStream::check(stream, &self.core)?;
        self.core.pool.install(|| {
            let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            calls.iter().try_for_each(|call| call.enqueue(stream))
        })
    }
}
