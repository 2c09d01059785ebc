//! Which neighbouring calls may become one launch: those of a segment that use each other's results.
//!
//! Nothing is said about tiles here: whether one launch can wait for what it makes itself is for the device to say. What one call of a
//! region updates in place others may read, before or after: the body has an order.

use super::Run;
use dsrun_core::program::{Lane, Program, ValueId};
use std::collections::HashSet;

/// The most calls that are looked at together. A layer has fewer, and layers grow together in rounds.
const MOST: usize = 16;

/// Calls of a segment of which each but the first uses a result of one before it.
pub(super) struct Neighbours<'a> {
    program: &'a Program,
    segment: Option<usize>,
    calls: usize,
    made: HashSet<ValueId>,
}

impl<'a> Neighbours<'a> {
    /// An empty run.
    pub(super) fn new(program: &'a Program) -> Self {
        Self { program, segment: None, calls: 0, made: HashSet::new() }
    }
}

impl Run for Neighbours<'_> {
    fn join(&mut self, node: usize) -> bool {
        let node = &self.program.nodes[node];
        let first = *self.segment.get_or_insert(node.segment);
        let connected =
            self.calls == 0 || node.call.operands.iter().flatten().any(|id| self.made.contains(id));
        let joins = connected
            && self.calls < MOST
            && first == node.segment
            && node.lane == Lane::Compute
            && node.call.op.mesh_axis().is_none();
        if joins {
            self.calls += 1;
            self.made.extend(&node.call.results);
        }
        joins
    }

    fn may_end(&self, _: &[usize]) -> bool {
        true
    }

    fn recomputed(&self) -> usize {
        0
    }
}
