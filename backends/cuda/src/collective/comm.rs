//! A rank's membership in a group.

use super::mailbox::Exchange;
use crate::{
    arch::crossover::Algorithm,
    driver::{
        context::Context,
        nccl::NcclComm,
        rendezvous::{Group, Turn},
    },
};
use dsrun_core::{
    Error, Result,
    collective::{Comm, host::HostComm},
};
use std::sync::{Arc, OnceLock};

/// A rank of a group on GPUs.
#[derive(Debug)]
pub(crate) struct CudaComm {
    host: HostComm,
    context: Arc<Context>,
    /// Whether ranks must synchronise on the host before their kernels wait for each other: if some share a device, the waiting
    /// kernels of one rank may prevent the other from loading its kernels. Then all of them do, because each waits for the others.
    in_step: bool,
    pub(crate) exchange: Option<Exchange>,
    pub(crate) nccl: Option<Arc<NcclComm>>,
    /// The only algorithm of all-reduces by peer exchange, if the user named one.
    pub(crate) only: Option<Algorithm>,
    failure: OnceLock<Error>,
}

impl CudaComm {
    pub(super) fn new(
        host: HostComm,
        context: Arc<Context>,
        exchange: Option<Exchange>,
        nccl: Option<Arc<NcclComm>>,
        may_be_apart: bool,
        only: Option<Algorithm>,
    ) -> Self {
        let in_step = !may_be_apart && exchange.as_ref().is_some_and(Exchange::any_share_device);
        Self { host, context, in_step, exchange, nccl, only, failure: OnceLock::new() }
    }

    /// Whether ranks synchronise on the host before they enqueue a collective, because some share a device. Whatever is enqueued with
    /// the collective must then not load kernels.
    pub(crate) fn in_step(&self) -> bool {
        self.in_step
    }

    /// The context of the rank's device.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Aborts the waits of this rank's kernels.
    fn end(&self) {
        self.exchange.iter().for_each(Exchange::end_own);
        self.nccl.iter().for_each(|nccl| nccl.abort());
    }

    /// Checks whether the group has failed, as far as this rank can see.
    fn look(&self) -> Result<()> {
        self.host.status()?;
        let waited = self.exchange.as_ref().map_or(Ok(()), Exchange::check);
        let worked = waited.and_then(|()| self.nccl.as_ref().map_or(Ok(()), |nccl| nccl.status()));
        worked.inspect_err(|error| {
            // Tells the other ranks.
            self.host.abort(error.message());
            self.exchange.iter().for_each(Exchange::end);
        })
    }
}

impl Group for CudaComm {
    fn check(&self) -> Result<()> {
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        self.look().map_err(|error| {
            self.end();
            self.failure.get_or_init(|| error).clone()
        })
    }

    fn before(&self, turns: &[Turn]) -> Result<()> {
        self.check()?;
        match self.exchange.as_ref().filter(|_| self.in_step) {
            Some(exchange) => self.met(exchange.members().before(self.host.rank(), turns, &|| self.check())),
            None => Ok(()),
        }
    }

    fn after(&self, turns: &[Turn]) -> Result<()> {
        match self.exchange.as_ref().filter(|_| self.in_step) {
            Some(exchange) => self.met(exchange.members().after(self.host.rank(), turns, &|| self.check())),
            None => Ok(()),
        }
    }
}

impl CudaComm {
    /// Passes on the result of a synchronisation on the host. If a rank is missing, the group is aborted.
    fn met(&self, outcome: Result<()>) -> Result<()> {
        outcome.inspect_err(|error| self.host.abort(error.message()))
    }
}

impl Comm for CudaComm {
    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn ranks(&self) -> usize {
        self.host.ranks()
    }

    fn status(&self) -> Result<()> {
        self.check()
    }

    fn abort(&self, reason: &str) {
        self.host.abort(reason);
        self.exchange.iter().for_each(Exchange::end);
        // This aborts the waits of this rank if the group has failed.
        let _ = self.check();
    }
}
