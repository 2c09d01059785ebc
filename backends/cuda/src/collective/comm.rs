//! A rank's membership in a group.

use super::{mailbox::Exchange, members};
use crate::driver::{
    context::Context,
    nccl::NcclComm,
    rendezvous::{Group, Turn},
};
use dsrun_core::{
    Error, Result,
    collective::{Comm, host::HostComm},
};
use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

/// How long a rank waits on the host for those that it shares a device with.
const MEETING_TIMEOUT: Duration = Duration::from_secs(60);
/// How many times longer it waits for a message: its sender computes what is in it.
const MESSAGE_PATIENCE: u32 = 10;

/// A rank of a group on GPUs.
#[derive(Debug)]
pub(crate) struct CudaComm {
    host: HostComm,
    context: Arc<Context>,
    /// Whether ranks have to be brought together on the host before they wait for each other on a device: where they share one, the
    /// kernels of one may keep out what the other has yet to load.
    in_step: bool,
    pub(crate) exchange: Option<Exchange>,
    pub(crate) nccl: Option<Arc<NcclComm>>,
    failure: OnceLock<Error>,
}

impl CudaComm {
    pub(super) fn new(
        host: HostComm,
        context: Arc<Context>,
        exchange: Option<Exchange>,
        nccl: Option<Arc<NcclComm>>,
        may_be_apart: bool,
    ) -> Self {
        let in_step = !may_be_apart && exchange.as_ref().is_some_and(Exchange::shares_device);
        Self { host, context, in_step, exchange, nccl, failure: OnceLock::new() }
    }

    /// The context of the rank's device.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Ends what the kernels of this rank wait for.
    fn end(&self) {
        self.exchange.iter().for_each(Exchange::end_own);
        self.nccl.iter().for_each(|nccl| nccl.abort());
    }

    /// The failure of the group as this rank sees it.
    fn look(&self) -> Result<()> {
        self.host.status()?;
        let waited = self.exchange.as_ref().map_or(Ok(()), Exchange::check);
        let worked = waited.and_then(|()| self.nccl.as_ref().map_or(Ok(()), |nccl| nccl.status()));
        worked.inspect_err(|error| {
            // The others have to know.
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
        let Some(exchange) = self.exchange.as_ref().filter(|_| self.in_step) else { return Ok(()) };
        let (members, rank) = (exchange.members(), self.host.rank());
        let all = turns.iter().filter(|turn| **turn == Turn::All).count();
        let first = (all > 0).then(|| members.come(rank, all));
        // This rank says first what it has come to, so that no two wait for each other.
        let receives: Vec<_> = turns
            .iter()
            .filter_map(|turn| if let Turn::Receive(peer) = turn { Some(*peer) } else { None })
            .map(|peer| (peer, members.receive(peer, rank)))
            .collect();
        let mut sends = vec![0; self.host.ranks()];
        for turn in turns {
            let Turn::Send(peer) = *turn else { continue };
            let message = members.next_message(rank, peer) + sends[peer];
            sends[peer] += 1;
            let missing =
                || (!members.is_awaited(rank, peer, message)).then(|| format!("rank {peer} to come"));
            self.wait(MESSAGE_PATIENCE, "to what it receives", missing)?;
        }
        for (peer, message) in receives {
            let missing = || (!members.is_sent(peer, rank, message)).then(|| format!("rank {peer}"));
            self.wait(MESSAGE_PATIENCE, "to enqueue what is received", missing)?;
        }
        first.map_or(Ok(()), |first| self.meet("to come to a collective", || members.behind(first)))
    }

    fn after(&self, turns: &[Turn]) -> Result<()> {
        let Some(exchange) = self.exchange.as_ref().filter(|_| self.in_step) else { return Ok(()) };
        let (members, rank) = (exchange.members(), self.host.rank());
        for turn in turns {
            if let Turn::Send(peer) = *turn {
                members.send(rank, peer);
            }
        }
        let all = turns.iter().filter(|turn| **turn == Turn::All).count();
        if all == 0 {
            return Ok(());
        }
        let first = members.enqueue(rank, all);
        self.meet("to enqueue a collective", || members.not_enqueued(first))
    }
}

impl CudaComm {
    /// Waits until no rank is behind.
    fn meet(&self, what: &str, behind: impl Fn() -> Vec<usize>) -> Result<()> {
        let missing = || {
            let behind: Vec<String> = behind().iter().map(usize::to_string).collect();
            (!behind.is_empty()).then(|| format!("rank {}", behind.join(", ")))
        };
        self.wait(1, what, missing)
    }

    /// Waits until there is nothing missing. If this takes too long, the group ends.
    fn wait(&self, patience: u32, what: &str, missing: impl Fn() -> Option<String>) -> Result<()> {
        members::wait(MEETING_TIMEOUT * patience, what, missing, || self.check())
            .inspect_err(|error| self.host.abort(error.message()))
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
        // This ends the waits of this rank.
        let _ = self.check();
    }
}
