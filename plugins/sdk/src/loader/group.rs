//! Graphs and collectives of a plugin.

use super::{
    device::PluginDevice,
    kernels::PluginCall,
    open_device::OpenDevice,
    plugin::{Health, Plugin, Raw, call, free, missing},
    stream::PluginStream,
};
use crate::{encode, prefix, raw::*};
use dsrun_core::{
    Error, Result,
    collective::{Collective, Comm, GroupId},
    device::Stream,
    graph::{Graph, Graphs},
    kernels::BoundCall,
};
use std::{any::Any, net::IpAddr, ptr, sync::Arc, time::Duration};

impl OpenDevice {
    fn graph_table(&self) -> Result<&dsr_graph_api> {
        self.plugin.tables.graph.as_ref().ok_or_else(|| missing("graph"))
    }

    fn comm_table(&self) -> Result<&dsr_comm_api> {
        self.plugin.tables.comm.as_ref().ok_or_else(|| missing("comm"))
    }
}

impl Graphs for PluginDevice {
    fn capture(&self, stream: &mut dyn Stream, calls: Vec<Box<dyn BoundCall>>) -> Result<Box<dyn Graph>> {
        let stream = PluginStream::of(stream, &self.open.plugin)?;
        let handle_of = |call: &dyn BoundCall| {
            let any: &dyn Any = call;
            let own = any.downcast_ref::<PluginCall>().filter(|call| call.is_of(&self.open.plugin));
            let own = own.ok_or_else(|| Error::invalid("is a call of another backend").at("calls"))?;
            Ok(own.handle.get())
        };
        let handles = calls.iter().map(|call| handle_of(&**call)).collect::<Result<Vec<_>>>()?;
        let table = self.open.graph_table()?;
        let mut handle = ptr::null_mut();
        let (device, count) = (self.open.handle.get(), handles.len());
        stream.health.call("stream", || {
            Ok(call!(table, capture(device, stream.handle.get(), handles.as_ptr(), count, &raw mut handle)))
        })?;
        let handle = Raw::new(handle, "graph")?;
        Ok(Box::new(PluginGraph {
            handle,
            health: Health::default(),
            _calls: calls,
            open: self.open.clone(),
        }))
    }
}

/// A graph of a plugin.
#[derive(Debug)]
struct PluginGraph {
    handle: Raw<dsr_graph>,
    health: Health,
    /// Kept alive, because the plugin may use them as long as the graph lives.
    _calls: Vec<Box<dyn BoundCall>>,
    open: Arc<OpenDevice>,
}

impl Drop for PluginGraph {
    fn drop(&mut self) {
        if let Ok(table) = self.open.graph_table() {
            free!(table, free, self.handle);
        }
    }
}

impl Graph for PluginGraph {
    fn launch(&self, stream: &mut dyn Stream) -> Result<()> {
        let stream = PluginStream::of(stream, &self.open.plugin)?;
        let table = self.open.graph_table()?;
        // After a panic the state of both is unknown.
        self.health.call("graph", || {
            stream
                .health
                .call("stream", || Ok(call!(table, launch(self.handle.get(), stream.handle.get()))))?;
            Ok(ptr::null_mut())
        })
    }
}

impl Collective for PluginDevice {
    fn group_id(&self, host: Option<IpAddr>) -> Result<GroupId> {
        let table = self.open.comm_table()?;
        let mut id = dsr_group_id { bytes: [0; 128] };
        let handle = self.open.handle.get();
        let address = host.map(|host| host.to_string()).unwrap_or_default();
        let address = prefix::str_of(&address);
        self.open.health.call("device", || Ok(call!(table, group_id(handle, address, &raw mut id))))?;
        Ok(GroupId(id.bytes))
    }

    fn join(&self, id: &GroupId, rank: usize, ranks: usize, timeout: Duration) -> Result<Arc<dyn Comm>> {
        let table = self.open.comm_table()?;
        let number = |value: usize, name| {
            u32::try_from(value)
                .map_err(|_| Error::invalid(format!("is {value}, which exceeds 32 bits")).at(name))
        };
        let (raw_rank, raw_ranks) = (number(rank, "rank")?, number(ranks, "ranks")?);
        let (id, timeout) = (dsr_group_id { bytes: id.0 }, encode::timeout(timeout));
        let mut handle = ptr::null_mut();
        let device = self.open.handle.get();
        self.open.health.call("device", || {
            Ok(call!(table, join(device, &raw const id, raw_rank, raw_ranks, timeout, &raw mut handle)))
        })?;
        let handle = Raw::new(handle, "comm")?;
        Ok(Arc::new(PluginComm { handle, rank, ranks, health: Health::default(), open: self.open.clone() }))
    }
}

/// A rank's membership in a group of a plugin's collective library.
#[derive(Debug)]
pub(super) struct PluginComm {
    pub(super) handle: Raw<dsr_comm>,
    rank: usize,
    ranks: usize,
    health: Health,
    open: Arc<OpenDevice>,
}

impl Drop for PluginComm {
    fn drop(&mut self) {
        if let Ok(table) = self.open.comm_table() {
            free!(table, free, self.handle);
        }
    }
}

impl PluginComm {
    /// The membership behind a trait object, if it belongs to this plugin.
    pub(super) fn of<'a>(comm: &'a dyn Comm, plugin: &Arc<Plugin>) -> Option<&'a Self> {
        let any: &dyn Any = comm;
        any.downcast_ref::<Self>().filter(|comm| Arc::ptr_eq(&comm.open.plugin, plugin))
    }
}

impl Comm for PluginComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn status(&self) -> Result<()> {
        let table = self.open.comm_table()?;
        self.health.call("comm", || Ok(call!(table, status(self.handle.get()))))
    }

    fn abort(&self, reason: &str) {
        if let Ok(table) = self.open.comm_table()
            && let Some(abort) = table.abort
        {
            // SAFETY: a live handle of this plugin, and a text that lives during the call.
            unsafe { abort(self.handle.get(), prefix::str_of(reason)) };
        }
    }
}
