//! The interface between streams and groups of ranks: called before and after collectives are enqueued, and while they are waited
//! for.

use dsrun_core::Result;
use std::{fmt::Debug, sync::Arc};

/// A group of ranks, as the streams that run its collectives see it.
pub(crate) trait Group: Debug + Send + Sync {
    /// Reports whether the group has failed. If another rank aborted it, this also aborts the waits of this rank's kernels.
    ///
    /// # Errors
    /// The reason of the failure. Results of collectives that were not waited for before are undefined.
    fn check(&self) -> Result<()>;

    /// Called before collectives are enqueued, with the peers of each. Ranks that share a device wait here until their peers are
    /// about to enqueue their part.
    ///
    /// # Errors
    /// If the group has failed, or a rank does not arrive in time.
    fn before(&self, turns: &[Turn]) -> Result<()>;

    /// Called after collectives were enqueued. Ranks that share a device wait here until their peers have enqueued their part.
    ///
    /// # Errors
    /// Same as [`Self::before`].
    fn after(&self, turns: &[Turn]) -> Result<()>;
}

/// The ranks that a collective exchanges data with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// All ranks of the group.
    All,
    /// This rank, which receives.
    Send(usize),
    /// This rank, which sends.
    Receive(usize),
}

/// The group of a collective, and its peers in it.
#[derive(Clone, Debug)]
pub(crate) struct Rendezvous {
    pub(crate) group: Arc<dyn Group>,
    pub(crate) turn: Turn,
}

/// The collectives of a sequence of calls by group, in order of first use.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gatherings(Vec<(Arc<dyn Group>, Vec<Turn>)>);

impl Gatherings {
    /// Adds a collective.
    pub(crate) fn add(&mut self, rendezvous: &Rendezvous) {
        let Rendezvous { group, turn } = rendezvous;
        match self.0.iter_mut().find(|(other, _)| Arc::ptr_eq(other, group)) {
            Some((_, turns)) => turns.push(*turn),
            None => self.0.push((group.clone(), vec![*turn])),
        }
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The groups.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &Arc<dyn Group>> {
        self.0.iter().map(|(group, _)| group)
    }

    /// Same as [`Group::before`], for every group.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn before(&self) -> Result<()> {
        self.0.iter().try_for_each(|(group, turns)| group.before(turns))
    }

    /// Same as [`Group::after`], for every group.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn after(&self) -> Result<()> {
        self.0.iter().try_for_each(|(group, turns)| group.after(turns))
    }
}

/// The groups whose collectives ran on a stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watched(Vec<Arc<dyn Group>>);

impl Watched {
    /// Adds groups that are not in the set yet.
    pub(crate) fn add<'a>(&mut self, groups: impl Iterator<Item = &'a Arc<dyn Group>>) {
        for group in groups {
            if !self.0.iter().any(|other| Arc::ptr_eq(other, group)) {
                self.0.push(group.clone());
            }
        }
    }

    /// Same as [`Group::check`], for every group.
    ///
    /// # Errors
    /// The error of the first group that failed.
    pub(crate) fn check(&self) -> Result<()> {
        self.0.iter().try_for_each(|group| group.check())
    }
}
