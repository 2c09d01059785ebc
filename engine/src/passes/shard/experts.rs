//! Choices that keep partial sums unreduced, and expert parallelism: each rank runs some of the experts.
//!
//! With expert parallelism a rank computes only the token slots that are routed to its own experts. The values in slots therefore
//! have a separate form ([`Form::Experts`]), and the weighted sum over slots gives a partial sum on each rank. The router and the
//! residual stream are replicated.
//!
//! Splitting every expert instead (expert slicing) follows from the index maps, as other products do.

use super::{
    choices::{Form, Mesh},
    iteration::{elementwise_slots, slots_of},
    splits::experts_of,
};
use dsrun_core::{
    Error, Result,
    op::{Op, OperandType},
    program::{Call, Origin, ValueId},
};
use std::ops::Range;

/// The forms of the operands and results of a call.
type Forms = (Vec<Form>, Vec<Form>);

impl Mesh<'_> {
    /// The forms with which a call can run on partial sums, because it is linear in them.
    pub(super) fn sums(&self, call: &Call) -> Option<Forms> {
        let (first, second) = match call.op {
            Op::GatherRows(_) | Op::MoeCombine(_) => (Form::Partial, Form::Whole),
            // A value with other readers is needed whole there, so reducing it once is cheaper.
            Op::Add(_) if self.adds_two_values_of_its_own(call) => (Form::Partial, Form::Partial),
            _ => return None,
        };
        let mut needs = vec![Form::Whole; call.operands.len()];
        (needs[0], needs[1]) = (first, second);
        Some((needs, vec![Form::Partial]))
    }

    fn adds_two_values_of_its_own(&self, call: &Call) -> bool {
        let readers = |id: ValueId| {
            let reads = |call: &Call| call.operands.iter().filter(|operand| **operand == Some(id)).count();
            self.program.nodes.iter().map(|node| reads(&node.call)).sum::<usize>()
        };
        let is_own = |id: &Option<ValueId>| id.is_some_and(|id| readers(id) == 1);
        let (added, others) = call.operands.split_at(2.min(call.operands.len()));
        added.iter().all(is_own) && others.iter().all(Option::is_none)
    }

    /// The way to run a call for some of the experts on each rank.
    pub(super) fn experts(&self, call: &Call) -> Option<Forms> {
        let count = match &call.op {
            Op::MoeGroup(op) => op.count,
            Op::GroupedLinear(op) => op.count,
            Op::MoeCombine(op) => op.count,
            _ => {
                elementwise_slots(self.program, call)?;
                return Some((vec![Form::Experts; call.operands.len()], vec![Form::Experts]));
            }
        };
        experts_of(count as usize, self.splits.ranks(), 0)?;
        let in_slots = |operand: usize| {
            let id = call.operands.get(operand).copied().flatten();
            id.is_some_and(|id| slots_of(self.program, id).is_some())
        };
        match call.op {
            Op::MoeGroup(_) => Some((vec![Form::Whole], vec![Form::Experts; 2])),
            Op::GroupedLinear(_) => {
                let x = if in_slots(0) { Form::Experts } else { Form::Whole };
                let [own, whole] = [Form::Experts, Form::Whole];
                Some((vec![x, own, whole, own, own, own], vec![own]))
            }
            Op::MoeCombine(_) if in_slots(0) => {
                Some((vec![Form::Experts, Form::Whole, Form::Whole], vec![Form::Partial]))
            }
            _ => None,
        }
    }

    /// The number of experts of a weight, vector or table that holds something for each, and those of a rank.
    pub(super) fn experts_of_value(&self, id: ValueId, rank: usize) -> Option<(usize, Range<usize>)> {
        let of_reader = |call: &Call| match &call.op {
            Op::GroupedLinear(op) if [1, 3].iter().any(|index| call.operands[*index] == Some(id)) => {
                Some(op.count)
            }
            _ => None,
        };
        let count = match self.program.values.get(id.index())?.origin {
            Origin::Node(node) => match &self.program.nodes.get(node)?.call {
                Call { op: Op::MoeGroup(op), results, .. } if results.get(1) == Some(&id) => Some(op.count),
                _ => None,
            },
            _ => self.program.nodes.iter().find_map(|node| of_reader(&node.call)),
        };
        let count = count? as usize;
        Some((count, experts_of(count, self.splits.ranks(), rank)?))
    }

    /// Reduces the type of a value to the experts of one rank.
    pub(super) fn keep_experts(&self, id: ValueId, rank: usize, value_type: &mut OperandType) {
        let Some((count, own)) = self.experts_of_value(id, rank) else { return };
        match value_type {
            OperandType::Weight(weight) => {
                if let Some(rows) = weight.shape.first_mut() {
                    *rows = *rows / count * own.len();
                }
            }
            OperandType::Tensor(tensor) => {
                if let Some(size) = tensor.shape.first_mut()
                    && let Some(known) = size.known()
                {
                    // A table of the start of each expert has one extra element, the end.
                    let rest = known % count;
                    *size = (known / count * own.len() + rest).into();
                }
            }
        }
    }

    /// The number of experts of a rank, and its first expert.
    ///
    /// # Errors
    /// If there are fewer experts than ranks, in which case this choice is never offered.
    pub(super) fn own_experts(&self, count: u32, first: u32, rank: usize) -> Result<(u32, u32)> {
        let lost = || Error::internal(format!("{count} experts are not split over ranks"));
        let own = experts_of(count as usize, self.splits.ranks(), rank).ok_or_else(lost)?;
        let number = |number: usize| u32::try_from(number).map_err(|_| lost());
        Ok((number(own.len())?, first.saturating_add(number(own.start)?)))
    }
}
