//! Groups of ranks on GPUs: how ranks join a group, and which of two transports its collectives use.
//!
//! | transport | ranks |
//! |---|---|
//! | [peer exchange](mailbox): kernels write to the memory of other ranks | in one process, on GPUs with peer access to each other, or on the same GPU |
//! | NCCL | on different GPUs, in one process or in several |
//!
//! A group has one of them or both; with both, [`crate::arch::crossover`] chooses by size. Ranks find each other through the host
//! transport, which reports missing ranks and tells all ranks why a group ended.

mod comm;
mod facts;
mod mailbox;
mod members;

use crate::driver::{
    context::Context,
    memory::CudaBuffer,
    nccl::{Nccl, NcclCall, NcclComm, Operation, UniqueId},
    stream::CudaStream,
};
pub(crate) use comm::CudaComm;
use dsrun_core::{
    Code, DType, Error, Result,
    collective::{
        Collective, Comm, GroupId,
        host::{HostCollective, HostComm},
    },
    device::MemoryKind,
    op::Reduction,
};
use facts::{Facts, Way};
use mailbox::Mailbox;
pub(crate) use mailbox::{
    BLOCKS, CREDITS, DEPTH, DIRECT_BLOCKS, DIRECT_BLOCKS_AT_ONCE, Exchange, MAX_RANKS, NO_PART, PART_BYTES,
    PATIENCE, RESULT_SETS, THREADS, nanoseconds,
};
use members::Members;
use std::{net::IpAddr, sync::Arc, time::Duration};

/// The environment variable that restricts collectives to one transport or algorithm: `nccl`, `peer` and others. For comparison
/// and tests.
const WAY: &str = "DSRUN_CUDA_COLLECTIVES";

/// The collectives of a device.
#[derive(Debug)]
pub(crate) struct CudaCollective {
    pub(crate) context: Arc<Context>,
    pub(crate) multiprocessors: usize,
}

impl Collective for CudaCollective {
    fn group_id(&self, host: Option<IpAddr>) -> Result<GroupId> {
        HostCollective.group_id(host)
    }

    fn join(&self, id: &GroupId, rank: usize, ranks: usize, timeout: Duration) -> Result<Arc<dyn Comm>> {
        let host = HostComm::join(id, rank, ranks, timeout)?.with_timeout(timeout);
        let way = match std::env::var_os(WAY) {
            Some(text) => Some(Way::named(&text.to_string_lossy())?),
            None => None,
        };
        let apart = way == Some(Way::PeerApart);
        let only = if let Some(Way::PeerBy(algorithm)) = way { Some(algorithm) } else { None };
        match self.connect(&host, id, way, timeout) {
            Ok((exchange, nccl)) => {
                Ok(Arc::new(CudaComm::new(host, self.context.clone(), exchange, nccl, apart, only)))
            }
            Err(error) => {
                // Otherwise the other ranks would wait for this one.
                host.abort(error.message());
                Members::forget(id);
                Err(error)
            }
        }
    }
}

impl CudaCollective {
    /// Connects the transports that the group can use.
    fn connect(
        &self,
        host: &HostComm,
        id: &GroupId,
        only: Option<Way>,
        timeout: Duration,
    ) -> Result<(Option<Exchange>, Option<Arc<NcclComm>>)> {
        let library = Nccl::open();
        let own = Facts::of(&self.context, library.as_ref().ok().map(|nccl| nccl.version()))?;
        let all = facts::gather(host, &own)?;
        let exchange = match only {
            Some(Way::Nccl) => None,
            _ if facts::one_process(&all) && all.len() <= MAX_RANKS => {
                // Peer access need not be symmetric, so all ranks have to agree on the transport.
                let (exchange, lacks) = match self.exchange(host, id)? {
                    (_, Some(error)) => (None, Some(error)),
                    (exchange, None) => (Some(exchange), None),
                };
                let reached = host.all_gather(&[u8::from(lacks.is_none())])?;
                if let Some(error) = lacks {
                    tracing::warn!(%error, "collectives of the group go through NCCL only");
                }
                exchange.filter(|_| reached.iter().all(|reached| **reached == [1]))
            }
            _ => None,
        };
        let reason = || facts::why_not_peers(only, &all, MAX_RANKS);
        let nccl = match (only, facts::shared_device(&all)) {
            (Some(Way::Peer | Way::PeerApart | Way::PeerBy(_)), _) => None,
            // A group of one rank exchanges nothing, so NCCL is not used for it unless requested.
            (None, _) if all.len() == 1 => None,
            (_, Some([first, second])) if exchange.is_none() => {
                let message = format!(
                    "ranks {first} and {second} share a GPU, but {}, and NCCL runs one rank on a GPU; give each rank a GPU of its \
                     own",
                    reason()
                );
                return Err(Error::unsupported(message));
            }
            (_, Some(_)) => None,
            (_, None) => match (library, facts::lacks_nccl(&all)) {
                (Ok(nccl), None) => Some(nccl),
                (Err(error), _) if exchange.is_none() => {
                    let message = format!("{}: {}", reason(), error.message());
                    return Err(Error::new(error.code(), message));
                }
                (Ok(_), Some(rank)) if exchange.is_none() => {
                    let message = format!("{}, and rank {rank} has no NCCL that can be used", reason());
                    return Err(Error::new(Code::Unavailable, message));
                }
                (library, _) => {
                    let error = library.err().map(|error| error.to_string()).unwrap_or_default();
                    tracing::warn!(
                        error,
                        "NCCL is missing: large collectives use peer exchange, which is slower for them"
                    );
                    None
                }
            },
        };
        if exchange.is_none() && nccl.is_none() {
            return Err(Error::unsupported(format!("{WAY} asks for peer exchange, but {}", reason())));
        }
        let nccl = nccl.map(|nccl| self.communicator(host, &nccl, timeout)).transpose()?;
        let (rank, ranks, peer) = (host.rank(), host.ranks(), exchange.is_some());
        tracing::debug!(rank, ranks, peer, ?nccl, "joined a group");
        Ok((exchange, nccl))
    }

    /// The mailboxes of the ranks of this process, and the reason if this rank cannot use them.
    fn exchange(&self, host: &HostComm, id: &GroupId) -> Result<(Exchange, Option<Error>)> {
        let (rank, ranks) = (host.rank(), host.ranks());
        let members = Members::of_group(id, ranks);
        members.add(rank, Arc::new(Mailbox::new(&self.context, self.multiprocessors, ranks)?));
        // All ranks have added their mailboxes.
        host.barrier()?;
        let mailboxes = members.mailboxes()?;
        let reached = mailboxes.iter().try_for_each(|mailbox| self.context.reach(mailbox.context()));
        let exchange = Exchange::new(rank, mailboxes, members);
        let written = reached.and_then(|()| exchange.write_probes(&self.context));
        // First barrier: all ranks have written their probes. Second barrier: all ranks hold the mailboxes, so the group can be
        // removed from the registry.
        host.barrier()?;
        let lacks = written.and_then(|()| exchange.check_probes(&self.context)).err();
        host.barrier()?;
        Members::forget(id);
        Ok((exchange, lacks))
    }

    fn communicator(&self, host: &HostComm, nccl: &Arc<Nccl>, timeout: Duration) -> Result<Arc<NcclComm>> {
        let mut id = match host.rank() {
            0 => nccl.unique_id()?,
            _ => UniqueId([0; 128]),
        };
        host.broadcast(&mut id.0, 0)?;
        self.context.enter()?;
        let comm = Arc::new(NcclComm::join(nccl, id, host.rank(), host.ranks(), timeout)?);
        // This barrier reports the ranks that failed before it.
        host.barrier()?;
        self.try_out(&comm, host.ranks(), timeout)?;
        Ok(comm)
    }

    /// Runs a test all-reduce, so that a broken connection fails here and not after weights were loaded.
    fn try_out(&self, comm: &Arc<NcclComm>, ranks: usize, timeout: Duration) -> Result<()> {
        let memory = CudaBuffer::new(self.context.clone(), size_of::<u32>(), MemoryKind::Device)?;
        self.context.write_bytes(memory.pointer, &1u32.to_le_bytes())?;
        let (stream, place) = (CudaStream::new(self.context.clone())?, memory.pointer);
        let operation = Operation::AllReduce(Reduction::Sum);
        let sum =
            NcclCall { comm: comm.clone(), operation, from: place, to: place, count: 1, dtype: DType::U32 };
        sum.enqueue(stream.raw)?;
        let summed = stream.wait_idle("a first sum by NCCL", timeout);
        let checked = summed.and_then(|()| comm.status());
        // NCCL's kernels must have ended before the memory is freed.
        checked.inspect_err(|_| comm.abort())?;
        let mut found = [0; size_of::<u32>()];
        self.context.read_bytes(place, &mut found)?;
        let found = u32::from_le_bytes(found);
        if found as usize == ranks {
            return Ok(());
        }
        let message = format!("NCCL sums {ranks} ones to {found}");
        Err(Error::new(Code::Communication, message))
    }
}
