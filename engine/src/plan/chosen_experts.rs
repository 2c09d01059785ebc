//! The expected number of experts of a layer that a step reads.

use dsrun_core::{
    Size,
    op::{Op, OperandType},
    program::{Call, Program, ValueId},
};

/// The experts whose matrices are stored in one weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Experts {
    pub(crate) count: usize,
    /// The number of experts of a token.
    pub(crate) slots: usize,
}

impl Experts {
    /// The experts of a weight that a call, or a call in its region, multiplies with; `None` if it is not a weight of experts.
    pub(crate) fn of_weight(program: &Program, call: &Call, weight: ValueId) -> Option<Self> {
        let index = call.operands.iter().position(|operand| *operand == Some(weight))?;
        let slots_of = |value_type: &OperandType| match value_type {
            OperandType::Tensor(tensor) => tensor.shape.get(1).and_then(Size::known),
            OperandType::Weight(_) => None,
        };
        match &call.op {
            Op::GroupedLinear(op) => {
                let slots = slots_of(&program.value((*call.operands.get(2)?)?).ok()?.value_type)?;
                Some(Self { count: op.count as usize, slots })
            }
            Op::Region(region) => {
                let types = region.value_types(&program.operand_types(&call.operands).ok()?).ok()?;
                region.calls().iter().find_map(|inner| match inner.op {
                    Op::GroupedLinear(op) if inner.operands.contains(&Some(ValueId::new(index))) => {
                        let slots = slots_of(types.get((*inner.operands.get(2)?)?.index())?.as_ref()?)?;
                        Some(Self { count: op.count as usize, slots })
                    }
                    _ => None,
                })
            }
            _ => None,
        }
    }

    /// The expected share of the experts that are chosen by at least one of `tokens` tokens, if routers choose all experts
    /// equally often.
    pub(crate) fn expected_share(self, tokens: usize) -> f64 {
        let count = self.count.max(1) as f64;
        1.0 - (1.0 - (self.slots as f64 / count).min(1.0)).powf(tokens as f64)
    }
}
