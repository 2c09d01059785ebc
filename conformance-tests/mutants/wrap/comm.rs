//! Groups of ranks, with a fault between them and the caller.

use super::Shared;
use crate::faults::Fault;
use dsrun_core::{
    Code, Error, Result,
    checked::ValidCall,
    collective::{Collective, Comm, GroupId},
    kernels::CallDesc,
};
use std::{any::Any, net::IpAddr, sync::Arc, time::Duration};

/// The collectives of a device, with its fault.
#[derive(Debug)]
pub(super) struct MutantCollective(pub(super) Arc<Shared>);

impl MutantCollective {
    fn inner(&self) -> Result<&dyn Collective> {
        self.0.inner.collective().ok_or_else(|| Error::internal("the CPU backend has collectives"))
    }
}

impl Collective for MutantCollective {
    fn group_id(&self, host: Option<IpAddr>) -> Result<GroupId> {
        self.inner()?.group_id(host)
    }

    fn join(&self, id: &GroupId, rank: usize, ranks: usize, timeout: Duration) -> Result<Arc<dyn Comm>> {
        let fault = self.0.fault;
        let rank = if fault.ranks_wrap { rank % ranks.max(1) } else { rank };
        let joined = self.inner()?.join(id, rank, ranks, timeout);
        let inner = joined.map_err(|error| match error.code() {
            Code::Timeout if fault.timeout_misnamed => Error::internal(error.message()),
            _ => error,
        })?;
        Ok(Arc::new(MutantComm { inner, fault }))
    }
}

/// A rank of a group of the CPU backend, with the fault of its device.
#[derive(Debug)]
struct MutantComm {
    inner: Arc<dyn Comm>,
    fault: &'static Fault,
}

impl Comm for MutantComm {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn status(&self) -> Result<()> {
        self.inner.status()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(if self.fault.abort_without_reason { "it was aborted" } else { reason });
    }
}

/// The call as the CPU backend knows it.
pub(super) fn unwrapped(call: &ValidCall) -> Result<ValidCall> {
    let Some(comm) = call.comm.clone() else { return Ok(call.clone()) };
    let any: Arc<dyn Any + Send + Sync> = comm.clone();
    let comm = any.downcast::<MutantComm>().map_or(comm, |comm| comm.inner.clone());
    CallDesc { comm: Some(comm), ..CallDesc::clone(call) }.validate()
}
