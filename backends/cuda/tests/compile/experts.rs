//! Calls of the ops of mixtures of experts: every router, and the linear layers of experts in every format and division of work.

use super::{Operand, bounded, call, integer_formats, tensor, weight};
use dsrun_core::{
    BlockFormat, DType, WeightFormat,
    checked::ValidCall,
    op::{GroupScore, GroupedLinear, MoeCombine, MoeGroup, MoeRoute, RouterNorm, RouterScore},
};

const ROUTE: MoeRoute = MoeRoute {
    top_k: 4,
    score: RouterScore::Softmax,
    groups: 1,
    top_groups: 1,
    group_score: GroupScore::Max,
    norm: RouterNorm::Sum,
    eps: 0.0,
    scale: 1.0,
    threshold: 0.0,
};

fn routers(dtype: DType) -> Vec<ValidCall> {
    let plane = |rows: usize, experts: usize| bounded(dtype, &[rows, experts]);
    let vector = |experts: usize| tensor(DType::F32, &[experts]);
    let none = || -> Operand { None };
    let mut calls = Vec::new();
    for score in
        [RouterScore::Softmax, RouterScore::Sigmoid, RouterScore::SoftmaxOfSelected, RouterScore::SparseMixer]
    {
        let op = MoeRoute { score, ..ROUTE };
        calls.push(call(op, vec![plane(3, 60), vector(60), none(), vector(60), none()]));
    }
    let clamped = MoeRoute { norm: RouterNorm::ClampedSum, ..ROUTE };
    calls.push(call(clamped, vec![plane(3, 64), none(), vector(64), none(), none()]));
    let given = bounded(DType::I32, &[3, 4]);
    calls.push(call(ROUTE, vec![plane(3, 64), none(), none(), none(), given]));
    for (group_score, experts) in
        [(GroupScore::Max, 160), (GroupScore::TopTwoSum, 256), (GroupScore::Max, 1024)]
    {
        let op = MoeRoute {
            score: RouterScore::Sigmoid,
            norm: RouterNorm::None,
            groups: 8,
            top_groups: 4,
            group_score,
            ..ROUTE
        };
        calls.push(call(op, vec![plane(3, experts), none(), vector(experts), none(), none()]));
    }
    calls
}

/// Few tokens and many, with tables and without, and weights that are whole steps or not.
fn linears(dtype: DType) -> Vec<ValidCall> {
    let formats = [dtype, DType::BF16].map(WeightFormat::Dense).into_iter();
    let formats = formats.chain(integer_formats(dtype)).chain([WeightFormat::Block(BlockFormat::Mxfp4)]);
    let mut calls = Vec::new();
    for format in formats {
        for (rows, inputs, per_slot, tables) in
            [(1, 1024, false, true), (3, 256, true, false), (40, 1024, false, true), (100, 256, true, true)]
        {
            let (count, outputs, slots) = (8, 40, 2);
            let width = if per_slot { slots * inputs } else { inputs };
            let experts = bounded(DType::I32, &[rows, slots]);
            let operands = vec![
                bounded(dtype, &[rows, width]),
                weight(format, [count * outputs, inputs]),
                experts.clone(),
                if per_slot { tensor(dtype, &[count * outputs]) } else { None },
                if tables { experts } else { None },
                if tables { tensor(DType::I32, &[count + 1]) } else { None },
            ];
            calls.push(call(GroupedLinear { dtype, count: count as u32, first_expert: 4 }, operands));
        }
    }
    calls
}

/// Calls of the ops of mixtures of experts.
pub(super) fn expert_calls(dtype: DType) -> Vec<ValidCall> {
    let (count, first_expert) = (16, 8);
    let mut calls = routers(dtype);
    for (rows, slots) in [(3, 4), (40, 8)] {
        let experts = bounded(DType::I32, &[rows, slots]);
        calls.push(call(MoeGroup { count, first_expert }, vec![experts.clone()]));
        let (x, weights) = (bounded(dtype, &[rows, slots * 64]), bounded(DType::F32, &[rows, slots]));
        calls.push(call(MoeCombine { count, first_expert }, vec![x, weights, experts]));
    }
    calls.extend(linears(dtype));
    calls
}
