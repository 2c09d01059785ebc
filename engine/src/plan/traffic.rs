//! Counts the work of a step: bytes read from memory, and multiply-adds of a prompt.

use super::{
    EnginePlan,
    calls::{is_cache, state_bytes, weight_desc},
    chosen_experts::Experts,
    step_interface::{StepSegment, StepSize},
};
use crate::error::Result;
use dsrun_core::{
    WeightType,
    device::Device,
    op::{AttentionMask, Op, OperandType},
    program::{Call, Origin, Value, ValueId},
};

/// Bytes that a step of generation reads from memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTraffic {
    /// Bytes of weights, read once per step; for experts, only those expected to be chosen.
    pub weights: u64,
    /// Bytes of KV cache, read for each token of a request's context.
    pub kv_per_token: u64,
}

impl EnginePlan {
    /// Counts the bytes that a decode step of `requests` requests has to read: the weights of matrix products, and the KV cache.
    /// Of experts, only those expected to be chosen by some token are counted. Embedding lookups, vectors and activations are
    /// negligible and not counted.
    ///
    /// # Errors
    /// If the device cannot say how large a packed weight is.
    pub fn step_traffic(&self, device: &dyn Device, requests: usize) -> Result<StepTraffic> {
        let program = self.programs.all_rows();
        let mut traffic = StepTraffic { weights: 0, kv_per_token: 0 };
        for (id, value) in program.values_from(|origin| *origin != Origin::Input) {
            match (&value.origin, &value.value_type) {
                (Origin::Weight(_), OperandType::Weight(weight))
                    if program.nodes.iter().any(|node| multiplies(&node.call, id)) =>
                {
                    let layout = device.kernels().prepack_query(&weight_desc(weight))?;
                    let experts =
                        program.nodes.iter().find_map(|node| Experts::of_weight(program, &node.call, id));
                    let share = experts.map_or(1.0, |experts| experts.expected_share(requests));
                    traffic.weights += (layout.bytes as f64 * share) as u64;
                }
                (Origin::State, _) if is_cache(value) => {
                    let slots = self.fixed.pages * self.options.block_size;
                    let bytes = state_bytes(value, self.limits, self.fixed)?;
                    traffic.kv_per_token += (bytes / slots.max(1)) as u64;
                }
                _ => {}
            }
        }
        Ok(traffic)
    }

    /// Counts the multiply-adds of the matrix products for a prompt of this many tokens whose last token is the only output row,
    /// attention included. Each is two floating-point operations.
    pub fn prompt_products(&self, tokens: usize) -> u64 {
        let (program, mut products) = (self.programs.pruned(), 0);
        // Few steps need hidden states, so the `embed` segment is not counted.
        let forward = |segment: usize| program.segments[segment].name == StepSegment::Forward.name();
        for node in program.nodes.iter().filter(|node| forward(node.segment)) {
            let value = |id: Option<ValueId>| program.values.get(id?.index());
            let result = value(node.call.results.first().copied());
            let rows = if result.and_then(StepSize::of_rows) == Some(StepSize::Tokens) { tokens } else { 1 };
            let (both_sides, window) = match node.call.op {
                Op::PagedAttention(attention) => (false, Some(attention.window)),
                Op::Attention(attention) => {
                    (attention.mask == AttentionMask::Bidirectional, Some(attention.window))
                }
                _ => (false, None),
            };
            let Some(window) = window else {
                for id in node.call.operands.iter().flatten() {
                    let weight = program.values[id.index()].weight_type();
                    let elements = weight.filter(|_| multiplies(&node.call, *id)).map(WeightType::elements);
                    let all = elements
                        .map_or(0, |elements| rows.saturating_mul(elements.unwrap_or(usize::MAX)))
                        as u64;
                    products += match Experts::of_weight(program, &node.call, *id) {
                        Some(Experts { count, slots }) => all / count.max(1) as u64 * slots as u64,
                        None => all,
                    };
                }
                continue;
            };
            // Two products, for scores and values. A query of a decoder attends to half of the prompt on average; the last one,
            // and every query of an encoder, attends to all of it.
            let query = value(node.call.operands[0]).and_then(Value::tensor_type);
            let features = query.and_then(|query| query.shape[1].known()).unwrap_or(0);
            let keys = if rows == 1 || both_sides { tokens } else { tokens / 2 };
            let seen = window as usize * if both_sides { 2 } else { 1 };
            let keys = if window > 0 { keys.min(seen) } else { keys };
            products += 2 * (rows * keys) as u64 * features as u64;
        }
        products
    }
}

/// Whether a call, or a call in its region, multiplies with a weight; `embed` only looks up rows.
fn multiplies(call: &Call, weight: ValueId) -> bool {
    let Some(index) = call.operands.iter().position(|operand| *operand == Some(weight)) else { return false };
    match &call.op {
        Op::Region(region) => region.calls().iter().any(|call| multiplies(call, ValueId::new(index))),
        op => !matches!(op, Op::Embed(_)),
    }
}
