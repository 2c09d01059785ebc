//! The calls of a mixture of experts in a decoder layer.

use super::{
    super::tape::{Tape, Value},
    shapes::Shape,
};
use dsrun_core::{
    DType,
    op::{
        GateLayout, GatedActivation, GroupScore, GroupedLinear, Linear, MoeCombine, MoeGroup, MoeRoute,
        RouterNorm, RouterScore,
    },
};

/// The mixture of experts of `x`, given the router, its selection bias, and both weights of the gated activation; and the last weight.
/// A bias follows each weight.
pub(super) fn mixture(
    tape: &mut Tape,
    dtype: DType,
    (shape, [count, chosen]): (&Shape, [usize; 2]),
    x: Option<Value>,
    up: &[Option<Value>],
    down: &[Option<Value>],
) -> Option<Value> {
    let one = |results: Vec<Value>| results.first().copied();
    let &[router, router_bias, selection_bias, ref halves @ ..] = up else { return None };
    let score = match selection_bias {
        Some(_) => RouterScore::Sigmoid,
        None if shape.bounded => RouterScore::SoftmaxOfSelected,
        None => RouterScore::Softmax,
    };
    let route = MoeRoute {
        top_k: chosen as u32,
        score,
        groups: 1,
        top_groups: 1,
        group_score: GroupScore::Max,
        norm: RouterNorm::Sum,
        eps: 0.0,
        scale: 1.5,
        threshold: 0.0,
    };
    let (count, first_expert) = (count as u32, 0);
    let logits = one(tape.call(Linear { dtype: DType::F32 }, [x, router, router_bias]));
    let routed = tape.call(route, [logits, None, selection_bias, None, None]);
    let (experts, weights) = (routed.first().copied(), routed.get(1).copied());
    let tables = tape.call(MoeGroup { count, first_expert }, [experts]);
    let linear = |tape: &mut Tape, x, own: &[Option<Value>]| {
        let tables = [tables.first().copied(), tables.get(1).copied()];
        let operands = [x, own[0], experts, own[1], tables[0], tables[1]];
        one(tape.call(GroupedLinear { dtype, count, first_expert }, operands))
    };
    let (gate, other) = (linear(tape, x, &halves[..2]), linear(tape, x, &halves[2..]));
    // Results are about 1 in size: some are beyond the limit.
    let [limit, up_offset] = if shape.bounded { [1.5, 1.0] } else { [0.0; 2] };
    let (function, layout) = (shape.variant.function, GateLayout::Separate);
    let gated = GatedActivation { function, layout, limit, up_offset };
    let activated = one(tape.call(gated, [gate, other, None]));
    let product = linear(tape, activated, down);
    one(tape.call(MoeCombine { count, first_expert }, [product, weights, experts]))
}
