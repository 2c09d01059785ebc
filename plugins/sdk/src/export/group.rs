//! Shims of graphs and collectives.

use super::{
    objects::{Object, exclusive, give_back, hand_out, object, with_stream},
    op::SharedCall,
    table::table,
};
use crate::{
    decode,
    host_table::{returned, value_or},
    prefix,
    raw::*,
};
use dsrun_core::{
    Error, Result,
    collective::{Collective, Comm, GroupId},
    device::{Device, Stream},
    graph::Graph,
    kernels::BoundCall,
};
use std::sync::{Arc, Mutex};

impl Object for Mutex<Box<dyn Graph>> {
    type Raw = dsr_graph;
    const KIND: usize = 8;
    const NAME: &'static str = "graph";
}

impl Object for Arc<dyn Comm> {
    type Raw = dsr_comm;
    const KIND: usize = 9;
    const NAME: &'static str = "comm";
}

/// The maximum number of calls in a graph.
const MAX_CALLS: usize = 1 << 20;

pub(super) const GRAPH: dsr_graph_api = {
    use graphs::*;
    table!(dsr_graph_api { capture, launch, free })
};

pub(super) const COMM: dsr_comm_api = {
    use comms::*;
    table!(dsr_comm_api { group_id, join, free, status, abort })
};

/// A captured call, which its handle and the graph share.
#[derive(Debug)]
struct CapturedCall(SharedCall);

impl BoundCall for CapturedCall {
    fn enqueue(&self, stream: &mut dyn Stream) -> Result<()> {
        exclusive(&self.0, "call")?.enqueue(stream)
    }
}

mod graphs {
    use super::*;

    pub(super) unsafe extern "C" fn capture(
        device: *mut dsr_device,
        stream: *mut dsr_stream,
        calls: *const *mut dsr_call,
        count: usize,
        graph: *mut *mut dsr_graph,
    ) -> *mut dsr_status {
        // SAFETY: the caller passes our device, stream and calls, and a place for the graph.
        returned(|| unsafe {
            prefix::check_out(graph, "graph")?;
            let device = object::<Arc<dyn Device>>(device)?;
            let graphs = device.graphs().ok_or_else(|| Error::unsupported("the device has no graphs"))?;
            let captured = |call: &*mut dsr_call| {
                let shared = object::<SharedCall>(*call)?.clone();
                Ok(Box::new(CapturedCall(shared)) as Box<dyn BoundCall>)
            };
            let calls = prefix::array(calls, count, MAX_CALLS, "calls")?;
            let calls = calls.iter().map(captured).collect::<Result<Vec<_>>>()?;
            let made = with_stream(stream, |stream| graphs.capture(stream, calls))?;
            prefix::put(graph, "graph", hand_out(Mutex::new(made)))
        })
    }

    pub(super) unsafe extern "C" fn launch(
        graph: *mut dsr_graph,
        stream: *mut dsr_stream,
    ) -> *mut dsr_status {
        // SAFETY: the caller passes our graph and stream.
        returned(|| unsafe {
            let graph = exclusive(object::<Mutex<Box<dyn Graph>>>(graph)?, "graph")?;
            with_stream(stream, |stream| graph.launch(stream))
        })
    }

    pub(super) unsafe extern "C" fn free(graph: *mut dsr_graph) {
        // SAFETY: the caller passes our graph, once.
        unsafe { give_back::<Mutex<Box<dyn Graph>>>(graph) }
    }
}

/// # Errors
/// If the device has no collective library.
fn collective(device: &Arc<dyn Device>) -> Result<&dyn Collective> {
    device.collective().ok_or_else(|| Error::unsupported("the device has no collective library"))
}

mod comms {
    use super::*;

    pub(super) unsafe extern "C" fn group_id(
        device: *mut dsr_device,
        address: dsr_str,
        id: *mut dsr_group_id,
    ) -> *mut dsr_status {
        // SAFETY: the caller passes our device and a place for the id.
        returned(|| unsafe {
            prefix::check_out(id, "id")?;
            let address = match &*prefix::text(address) {
                "" => None,
                text => Some(text.parse().map_err(|_| {
                    Error::invalid(format!("is `{text}`, must be an IP address")).at("address")
                })?),
            };
            let GroupId(bytes) = collective(object::<Arc<dyn Device>>(device)?)?.group_id(address)?;
            prefix::put(id, "id", dsr_group_id { bytes })
        })
    }

    pub(super) unsafe extern "C" fn join(
        device: *mut dsr_device,
        id: *const dsr_group_id,
        rank: u32,
        ranks: u32,
        timeout_nanoseconds: u64,
        comm: *mut *mut dsr_comm,
    ) -> *mut dsr_status {
        // SAFETY: the caller passes our device, an id, and a place for the membership.
        returned(|| unsafe {
            prefix::check_out(comm, "comm")?;
            prefix::check_out(id.cast_mut(), "id")?;
            let collective = collective(object::<Arc<dyn Device>>(device)?)?;
            let (id, timeout) = (GroupId(id.read().bytes), decode::timeout(timeout_nanoseconds));
            let joined = collective.join(&id, rank as usize, ranks as usize, timeout)?;
            prefix::put(comm, "comm", hand_out(joined))
        })
    }

    pub(super) unsafe extern "C" fn free(comm: *mut dsr_comm) {
        // SAFETY: the caller passes our membership, once.
        unsafe { give_back::<Arc<dyn Comm>>(comm) }
    }

    pub(super) unsafe extern "C" fn status(comm: *mut dsr_comm) -> *mut dsr_status {
        // SAFETY: the caller passes our membership.
        returned(|| unsafe { object::<Arc<dyn Comm>>(comm) }?.status())
    }

    pub(super) unsafe extern "C" fn abort(comm: *mut dsr_comm, reason: dsr_str) {
        // SAFETY: the caller passes our membership and a text.
        value_or((), || unsafe {
            object::<Arc<dyn Comm>>(comm)?.abort(&prefix::text(reason));
            Ok(())
        });
    }
}
