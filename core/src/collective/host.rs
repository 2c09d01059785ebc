//! Collectives over host memory, for backends without a collective library.
//!
//! The ranks are threads of this process, processes that are connected by TCP, or reached through a [`HostTransport`]. Reductions combine the ranks in order, in f32
//! for floats, so every rank gets the same bits. A rank that runs another collective, times out or aborts fails the whole
//! group, with a message that names the rank.

mod local;
mod monitor;
mod reduce;
pub mod tcp;
#[cfg(test)]
mod tests;

use super::{Collective, Comm, GroupId};
use crate::{DType, Error, Result, op::Reduction};
use local::LocalRank;
use std::{
    fmt::Debug,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tcp::TcpRank;

/// The time a collective waits for the other ranks, unless set otherwise.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// The factor by which a rank waits longer for a message than for a collective: ranks reach a collective at about the same time,
/// but send a message only when its contents have been computed.
const MESSAGE_PATIENCE: u32 = 10;

/// Collectives over the threads of this process, or over processes that are connected by TCP.
///
/// The messages between processes are neither encrypted nor signed: their network must be a trusted one.
#[derive(Debug, Default)]
pub struct HostCollective;

impl Collective for HostCollective {
    fn group_id(&self, host: Option<IpAddr>) -> Result<GroupId> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if let Some(host) = host {
            return tcp::group_id(host);
        }
        // The first byte distinguishes the ids of thread groups from those of process groups.
        let mut id = [0; 128];
        id[1..9].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        Ok(GroupId(id))
    }

    fn join(&self, id: &GroupId, rank: usize, ranks: usize, timeout: Duration) -> Result<Arc<dyn Comm>> {
        HostComm::join(id, rank, ranks, timeout).map(|comm| Arc::new(comm) as Arc<dyn Comm>)
    }
}

/// A rank's connection to the other ranks of its group, over which [`HostComm`] runs collectives.
///
/// A plugin gets one from the program that loaded it. Each method does what the method of [`HostComm`] with its name does, on
/// arguments that [`HostComm`] has checked.
#[allow(missing_docs, reason = "documented at HostComm")]
#[allow(clippy::missing_errors_doc, reason = "documented at HostComm")]
pub trait HostTransport: Send + Sync + Debug {
    fn all_reduce(&self, bytes: &mut [u8], dtype: DType, reduction: Reduction) -> Result<()>;
    fn reduce_scatter(
        &self,
        source: &[u8],
        destination: &mut [u8],
        dtype: DType,
        reduction: Reduction,
    ) -> Result<()>;
    /// Writes the bytes of every rank to `destination`, in the order of ranks.
    fn all_gather(&self, source: &[u8], destination: &mut [u8]) -> Result<()>;
    fn all_to_all(&self, source: &[u8], destination: &mut [u8]) -> Result<()>;
    fn broadcast(&self, bytes: &mut [u8], root: usize) -> Result<()>;
    fn barrier(&self) -> Result<()>;
    fn send(&self, bytes: &[u8], peer: usize) -> Result<()>;
    fn receive(&self, bytes: &mut [u8], peer: usize) -> Result<()>;
    fn status(&self) -> Result<()>;
    fn abort(&self, reason: &str);
}

/// A rank of a group that runs collectives over host memory.
#[derive(Debug)]
pub struct HostComm {
    rank: usize,
    ranks: usize,
    connection: Connection,
}

#[derive(Debug)]
enum Connection {
    /// To the other threads of this process.
    Local(LocalRank),
    /// To other processes.
    Tcp(Box<TcpRank>),
    Transport(Box<dyn HostTransport>),
}

impl HostComm {
    /// Makes all members of a new group of threads, in the order of ranks.
    ///
    /// # Errors
    /// If `ranks` is 0.
    pub fn group(ranks: usize) -> Result<Vec<Self>> {
        if ranks == 0 {
            return Err(Error::invalid("is 0, must be at least 1").at("ranks"));
        }
        let members = LocalRank::group(ranks).into_iter().enumerate();
        Ok(members.map(|(rank, member)| Self::local(member, rank, ranks)).collect())
    }

    /// Joins a group of threads or processes, as [`Collective::join`] does.
    ///
    /// # Errors
    /// As [`Collective::join`].
    pub fn join(id: &GroupId, rank: usize, ranks: usize, timeout: Duration) -> Result<Self> {
        check_rank(rank, ranks)?;
        let connection = if tcp::is_over_tcp(id) {
            Connection::Tcp(Box::new(TcpRank::join(id, rank, ranks, timeout)?))
        } else {
            Connection::Local(LocalRank::join(id, rank, ranks, timeout)?)
        };
        Ok(Self { rank, ranks, connection })
    }

    /// A rank of a group that a transport connects. The transport decides how long its collectives wait.
    ///
    /// # Errors
    /// If `rank` is not below `ranks`.
    pub fn over(transport: Box<dyn HostTransport>, rank: usize, ranks: usize) -> Result<Self> {
        check_rank(rank, ranks)?;
        Ok(Self { rank, ranks, connection: Connection::Transport(transport) })
    }

    fn local(member: LocalRank, rank: usize, ranks: usize) -> Self {
        Self { rank, ranks, connection: Connection::Local(member) }
    }

    /// Changes how long collectives over threads or processes wait. A transport is not affected.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        match &mut self.connection {
            Connection::Local(member) => member.set_timeout(timeout),
            Connection::Tcp(member) => member.set_timeout(timeout),
            Connection::Transport(_) => {}
        }
        self
    }

    fn transport(&self) -> &dyn HostTransport {
        match &self.connection {
            Connection::Local(member) => member,
            Connection::Tcp(member) => &**member,
            Connection::Transport(transport) => &**transport,
        }
    }

    /// Reduces `bytes` over all ranks, in place.
    ///
    /// # Errors
    /// If a rank runs another collective, the wait times out, or the group was aborted.
    pub fn all_reduce(&self, bytes: &mut [u8], dtype: DType, reduction: Reduction) -> Result<()> {
        self.transport().all_reduce(bytes, dtype, reduction)
    }

    /// Reduces `source` over all ranks, and writes this rank's share of the result to `destination`.
    ///
    /// # Errors
    /// As [`Self::all_reduce`], or if `source` is not as long as the shares of all ranks.
    pub fn reduce_scatter(
        &self,
        source: &[u8],
        destination: &mut [u8],
        dtype: DType,
        reduction: Reduction,
    ) -> Result<()> {
        if destination.len().checked_mul(self.ranks) != Some(source.len()) {
            let (bytes, share, ranks) = (source.len(), destination.len(), self.ranks);
            let message = format!("is {bytes} bytes, must be {ranks} shares of {share} bytes");
            return Err(Error::invalid(message).at("source"));
        }
        self.transport().reduce_scatter(source, destination, dtype, reduction)
    }

    /// Gathers the bytes of every rank, in the order of ranks.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    pub fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Arc<[u8]>>> {
        match &self.connection {
            Connection::Local(member) => member.gather(bytes),
            Connection::Tcp(member) => member.gather(bytes),
            Connection::Transport(transport) => {
                let length = bytes.len().checked_mul(self.ranks);
                let mut all =
                    vec![0; length.ok_or_else(|| Error::invalid("the bytes of all ranks overflow"))?];
                transport.all_gather(bytes, &mut all)?;
                let rank = |rank: usize| all[rank * bytes.len()..][..bytes.len()].into();
                Ok((0..self.ranks).map(rank).collect())
            }
        }
    }

    /// Exchanges blocks: block `j` of `source` goes to rank `j`, and block `j` of `destination` comes from rank `j`.
    ///
    /// # Errors
    /// As [`Self::all_reduce`], or if the lengths differ or are not a multiple of the number of ranks.
    pub fn all_to_all(&self, source: &[u8], destination: &mut [u8]) -> Result<()> {
        if source.len() != destination.len() || !source.len().is_multiple_of(self.ranks) {
            let (sent, received, ranks) = (source.len(), destination.len(), self.ranks);
            let message = format!("is {sent} bytes for {received}, must be equal multiples of {ranks} ranks");
            return Err(Error::invalid(message).at("source"));
        }
        self.transport().all_to_all(source, destination)
    }

    /// Copies `bytes` of rank `root` to all ranks, in place.
    ///
    /// # Errors
    /// As [`Self::all_reduce`], or if `root` is not a rank.
    pub fn broadcast(&self, bytes: &mut [u8], root: usize) -> Result<()> {
        if root >= self.ranks {
            return Err(Error::invalid(format!("is {root}, must be below {}", self.ranks)).at("root"));
        }
        self.transport().broadcast(bytes, root)
    }

    /// Waits until all ranks have reached the barrier.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    pub fn barrier(&self) -> Result<()> {
        self.transport().barrier()
    }

    /// Sends bytes to rank `peer` without waiting for it.
    ///
    /// # Errors
    /// If `peer` is not another rank, or the group has failed.
    pub fn send(&self, bytes: &[u8], peer: usize) -> Result<()> {
        self.check_peer(peer)?;
        self.transport().send(bytes, peer)
    }

    /// Receives a message of rank `peer`, which may take ten times as long as a collective. The messages of a rank arrive in order.
    ///
    /// # Errors
    /// As [`Self::all_reduce`], or if `peer` is not another rank or its message has another length.
    pub fn receive(&self, bytes: &mut [u8], peer: usize) -> Result<()> {
        self.check_peer(peer)?;
        self.transport().receive(bytes, peer)
    }

    fn check_peer(&self, peer: usize) -> Result<()> {
        if peer < self.ranks && peer != self.rank {
            return Ok(());
        }
        let message = format!("is {peer}, must be another rank than {} below {}", self.rank, self.ranks);
        Err(Error::invalid(message).at("peer"))
    }
}

/// Writes parts of equal length to `destination`, one after the other.
fn concatenate(parts: &[Arc<[u8]>], destination: &mut [u8]) {
    let length = destination.len() / parts.len().max(1);
    for (part, out) in parts.iter().zip(destination.chunks_exact_mut(length.max(1))) {
        out.copy_from_slice(part);
    }
}

/// Names the members that are not present.
fn missing_ranks(noun: &str, present: impl Iterator<Item = bool>) -> String {
    let missing: Vec<String> =
        present.enumerate().filter(|(_, present)| !present).map(|(rank, _)| rank.to_string()).collect();
    format!("{noun} {}", missing.join(", "))
}

fn check_rank(rank: usize, ranks: usize) -> Result<()> {
    if rank < ranks {
        return Ok(());
    }
    Err(Error::invalid(format!("is {rank}, must be below {ranks}")).at("rank"))
}

impl Comm for HostComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn status(&self) -> Result<()> {
        self.transport().status()
    }

    fn abort(&self, reason: &str) {
        self.transport().abort(reason);
    }
}
