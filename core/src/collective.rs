//! Groups of ranks that compute together.
//!
//! Every rank of a group enqueues the same collectives in the same order. A backend without a collective library uses
//! [`host`], which works on memory the host can reach.

pub mod host;

use crate::Result;
use std::{any::Any, fmt::Debug, sync::Arc, time::Duration};

/// Names a group while its ranks gather. One rank makes it and gives it to the others by whatever means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupId(pub [u8; 128]);

/// Making groups.
pub trait Collective: Send + Sync {
    /// A name for a new group.
    ///
    /// # Errors
    /// If the collective library fails.
    fn group_id(&self) -> Result<GroupId>;

    /// Joins a group of `ranks` as rank `rank`, and waits until all ranks have.
    ///
    /// # Errors
    /// If the rank is taken or outside, the sizes differ, or not all ranks came within `timeout`: the message names those
    /// that are missing.
    fn join(&self, id: &GroupId, rank: usize, ranks: usize, timeout: Duration) -> Result<Arc<dyn Comm>>;
}

/// A rank's membership in a group.
pub trait Comm: Any + Send + Sync + Debug {
    /// This rank.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn ranks(&self) -> usize;

    /// The error of a collective that failed after it was enqueued, if any did.
    ///
    /// # Errors
    /// That error.
    fn status(&self) -> Result<()>;

    /// Makes everything that waits in this group, on any rank, fail now with this reason.
    fn abort(&self, reason: &str);
}
