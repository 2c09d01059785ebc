//! Groups of ranks that run collectives.
//!
//! Every rank of a group enqueues the same collectives in the same order. A backend without a collective library uses
//! [`host`], which works on memory that the host can access.

pub mod host;

use crate::Result;
use std::{any::Any, fmt::Debug, net::IpAddr, sync::Arc, time::Duration};

/// Identifies a group while its ranks join. One rank makes it and passes it to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupId(pub [u8; 128]);

/// The collective library of a device.
pub trait Collective: Send + Sync {
    /// Makes the id of a new group, in a process that at least one of its ranks runs in.
    ///
    /// `host` is the address at which the processes of the other ranks reach this one, or `None` if all ranks run in this
    /// process. A collective library that connects processes by itself need not use it.
    ///
    /// # Errors
    /// If the collective library fails, or nothing can listen at `host`.
    fn group_id(&self, host: Option<IpAddr>) -> Result<GroupId>;

    /// Joins a group of `ranks` ranks as rank `rank`, and waits until all ranks have joined.
    ///
    /// # Errors
    /// If the rank is taken or out of range, the ranks disagree on `ranks`, or not all ranks joined within `timeout`; the
    /// message names the missing ranks.
    fn join(&self, id: &GroupId, rank: usize, ranks: usize, timeout: Duration) -> Result<Arc<dyn Comm>>;
}

/// A rank's membership in a group.
pub trait Comm: Any + Send + Sync + Debug {
    /// This rank.
    fn rank(&self) -> usize;

    /// The number of ranks in the group.
    fn ranks(&self) -> usize;

    /// Reports whether a collective has failed after it was enqueued.
    ///
    /// # Errors
    /// The error of that collective.
    fn status(&self) -> Result<()>;

    /// Makes every wait in this group, on every rank, fail at once with this reason.
    fn abort(&self, reason: &str);
}
