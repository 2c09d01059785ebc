//! The neighbour rule: calls of a segment that use each other's results may become one launch.
//!
//! The rule ignores tiles: the device decides whether one launch can synchronise between the calls, and between ranks if one of the
//! calls is a collective. A call of a region may read what another call of it updates in place, because the calls of a region are
//! ordered.

use super::Run;
use dsrun_core::program::{Lane, Program, ValueId};
use std::collections::HashSet;

/// The maximum number of calls in a run. A layer has fewer, and layers are merged in later rounds.
const MAX_CALLS: usize = 16;

/// A run of calls of a segment in which each call after the first uses a result of an earlier one.
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
            && self.calls < MAX_CALLS
            && first == node.segment
            && (node.lane == Lane::Compute || node.lane == Lane::usual(&node.call.op));
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
