//! Calls of the ops of mixtures of experts: every router, and the linear layers of experts in every format and division of work.

use super::{Operand, bounded, call, integer_formats, outlined::outlined, tensor, weight};
use dsrun_core::{
    BlockFormat, DType, TensorType, WeightExpr, WeightFormat, WeightType,
    checked::ValidCall,
    op::{
        GateLayout, GatedActivation, GroupScore, GroupedLinear, MoeCombine, MoeGroup, MoeRoute, Nonlinearity,
        RouterNorm, RouterScore,
    },
    program::ProgramBuilder,
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
        for (rows, inputs, per_slot, tables) in [
            (1, 1024, false, true),
            (3, 256, true, false),
            (24, 1024, false, true),
            (100, 256, false, true),
            (600, 256, true, true),
        ] {
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

/// The experts of a layer as one region, for one token and for many.
fn mixtures(dtype: DType) -> Vec<ValidCall> {
    let mut calls = Vec::new();
    for (rows, biased, name) in [
        (1, false, ""),
        (1, true, "mxfp4"),
        (20, true, ""),
        (20, false, "int4g128_f16"),
        (100, true, "mxfp4"),
    ] {
        let (count, slots, inputs, hidden) = (16, 4, 256, 128);
        let format = WeightFormat::from_name(name).unwrap_or(WeightFormat::Dense(dtype));
        let mut program = ProgramBuilder::new("mixture");
        let mut input = |name: &str, dtype, shape: &[usize]| {
            program.input(name, TensorType::new(dtype, shape.iter().copied())).unwrap()
        };
        let (logits, x) = (input("logits", DType::F32, &[rows, count]), input("x", dtype, &[rows, inputs]));
        let mut bias = |name: &str, outputs: usize| biased.then(|| input(name, dtype, &[count * outputs]));
        let biases = [bias("gate_bias", hidden), bias("up_bias", hidden), bias("down_bias", inputs)];
        let mut weight = |name: &str, shape: [usize; 2]| {
            let weight_type = WeightType { format, shape: shape.to_vec() };
            program.weight(name, WeightExpr::tensor(name), weight_type).unwrap()
        };
        let weights = [
            weight("gate", [count * hidden, inputs]),
            weight("up", [count * hidden, inputs]),
            weight("down", [count * inputs, hidden]),
        ];
        let routed = program.calls(ROUTE, [Some(logits), None, None, None, None]).unwrap();
        let (count, first_expert) = (count as u32, 0);
        let tables = program.calls(MoeGroup { count, first_expert }, [Some(routed[0])]).unwrap();
        assert_eq!((ROUTE.top_k as usize, tables.len()), (slots, 2));
        let layer = |program: &mut ProgramBuilder, x, index: usize| {
            let (weight, experts) = (Some(weights[index]), Some(routed[0]));
            let operands = [Some(x), weight, experts, biases[index], Some(tables[0]), Some(tables[1])];
            program.call(GroupedLinear { dtype, count, first_expert }, operands).unwrap()
        };
        let (gate, up) = (layer(&mut program, x, 0), layer(&mut program, x, 1));
        let activation = GatedActivation {
            function: Nonlinearity::Silu,
            layout: GateLayout::Separate,
            limit: if biased { 7.0 } else { 0.0 },
            up_offset: if biased { 1.0 } else { 0.0 },
        };
        let activated = program.call(activation, [Some(gate), Some(up), None]).unwrap();
        let down = layer(&mut program, activated, 2);
        let combine = MoeCombine { count, first_expert };
        let y = program.call(combine, [Some(down), Some(routed[1]), Some(routed[0])]).unwrap();
        calls.push(outlined(&program.finish(&[y]).unwrap()));
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

/// Calls of regions of experts, which run on tensor cores.
pub(super) fn mixture_calls() -> Vec<ValidCall> {
    [DType::F16, DType::BF16].into_iter().flat_map(mixtures).collect()
}
