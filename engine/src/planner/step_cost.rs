//! The predicted cost of a step of one rank.

use super::Bound;
use crate::{passes::shard::MeshCosts, plan::StepSegment};
use dsrun_core::{Result, op::Op, program::Program};

/// The predicted cost of a step of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct StepCost {
    /// Microseconds of memory-bound calls.
    pub(super) read_us: f64,
    /// Microseconds of compute-bound calls.
    pub(super) compute_us: f64,
    /// Microseconds of the bytes of exchanges with other ranks.
    link_us: f64,
    /// Microseconds of the latency of exchanges.
    latency_us: f64,
    /// Microseconds in which experts are chosen.
    pub(super) choice_us: f64,
    /// Bytes that the step reads and writes.
    pub(super) bytes: f64,
}

impl StepCost {
    /// Computes the cost of a program whose tensor axis has `ranks` ranks. `sends` are the costs of the link to the next stage, and
    /// `choice_us` the microseconds in which the experts of a layer are chosen.
    /// Segments that few steps run are ignored.
    pub(super) fn of(
        program: &Program,
        costs: &MeshCosts,
        sends: &MeshCosts,
        ranks: usize,
        choice_us: f64,
    ) -> Result<Self> {
        let mut cost = Self::default();
        let usual = |segment: usize| {
            let name = program.segments.get(segment).map(|segment| segment.name.as_str());
            [StepSegment::Forward, StepSegment::Sample].iter().any(|usual| name == Some(usual.name()))
        };
        for node in program.nodes.iter().filter(|node| usual(node.segment)) {
            let call = &node.call;
            let operands = program.operand_types(&call.operands)?;
            let results: Vec<_> = (call.results.iter())
                .filter_map(|id| program.values.get(id.index())?.tensor_type().cloned())
                .collect();
            let exchanged = || {
                let operand = call.operands.first().copied().flatten();
                let operand = operand.and_then(|id| program.values.get(id.index())?.tensor_type());
                let bytes = |tensor| costs.bytes(tensor);
                f64::max(operand.map_or(0.0, bytes), results.first().map_or(0.0, bytes))
            };
            let (all, alone) = match &call.op {
                Op::AllReduce(_) => (costs.all_reduce(exchanged(), ranks), costs.all_reduce(0.0, ranks)),
                Op::AllGather(_) | Op::ReduceScatter(_) => {
                    (costs.gather(exchanged(), ranks), costs.gather(0.0, ranks))
                }
                Op::Send(_) => (sends.send(exchanged()), sends.send(0.0)),
                // The transfer is counted at the send.
                Op::Receive(_) => (0, 0),
                op => {
                    let work = costs.work(op, op, &operands, &results);
                    cost.bytes += work.bytes;
                    if matches!(op, Op::MoeRoute(_)) {
                        cost.choice_us += choice_us;
                    }
                    let (read, compute) = (work.read_seconds(costs) * 1e6, work.compute_seconds(costs) * 1e6);
                    match compute > read {
                        true => cost.compute_us += compute,
                        false => cost.read_us += read,
                    }
                    continue;
                }
            };
            cost.link_us += (all - alone) as f64 / 1e6;
            cost.latency_us += alone as f64 / 1e6;
        }
        Ok(cost)
    }

    /// Microseconds of exchanges.
    pub(super) fn exchange_us(&self) -> f64 {
        self.link_us + self.latency_us
    }

    /// Microseconds of the step.
    pub(super) fn total_us(&self) -> f64 {
        self.read_us + self.compute_us + self.choice_us + self.exchange_us()
    }

    /// The bottleneck.
    pub(super) fn bound(&self) -> Bound {
        let parts = [
            (self.read_us, Bound::Memory),
            (self.compute_us, Bound::Operations),
            (self.link_us, Bound::LinkBandwidth),
            (self.latency_us, Bound::LinkLatency),
            (self.choice_us, Bound::Choices),
        ];
        parts.into_iter().max_by(|(a, _), (b, _)| a.total_cmp(b)).map_or(Bound::Memory, |(_, bound)| bound)
    }
}
