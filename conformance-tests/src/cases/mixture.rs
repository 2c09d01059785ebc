//! Cases of the experts of a layer as one region, from the logits of the router to the weighted sum. Its oracle is composed of those of
//! the primitives.

use super::{
    linear::{columns_of, random_weight},
    moe::{SHAPES, Shape, drawn_shape, formats, other},
    region,
    wanted::is_wanted,
};
use crate::{
    case::{CallCase, Case, Expected, Layout, Operand, Weight},
    draw::Draw,
    gate::Gate,
    oracle::{
        Real, chain,
        moe::{self, RouterVectors},
    },
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType, WeightFormat,
    op::{
        GateLayout, GatedActivation, GroupScore, GroupedLinear, MoeCombine, MoeGroup, MoeRoute, Nonlinearity,
        Op, RouterNorm, RouterScore,
    },
    program::{Call, ValueId},
    region::Region,
};

/// The linear layers of all experts.
struct Layer {
    weight: Weight,
    elements: Vec<f64>,
    bias: Option<Tensor>,
}

impl Layer {
    /// A layer of experts with so many outputs and inputs each.
    fn random(
        random: &mut Random,
        (format, dtype, biased): (WeightFormat, DType, bool),
        [experts, outputs, inputs]: [usize; 3],
    ) -> Self {
        let size = 1.0 / (inputs as f64).sqrt();
        let (weight, elements) = random_weight(random, format, [experts * outputs, inputs], size);
        let bias = biased.then(|| random.tensor(dtype, &[experts * outputs], Values::Uniform));
        Self { weight, elements, bias }
    }

    /// The outputs of an expert.
    fn of(&self, x: &[Real], expert: usize, outputs: usize) -> Vec<Real> {
        let elements = &self.elements[expert * outputs * x.len()..][..outputs * x.len()];
        let biases = self.bias.as_ref().map(Tensor::values);
        let bias = biases.as_deref().map(|bias| &bias[expert * outputs..][..outputs]);
        let quantised = self.weight.weight_type.format.is_quantised();
        chain::linear(x, elements, bias, quantised).into_iter().map(chain::stored).collect()
    }
}

/// The body, whose operands are the logits, the activations, and weight and bias of gate, other half and last layer.
fn body(
    dtype: DType,
    route: MoeRoute,
    count: u32,
    activation: GatedActivation,
    biased: bool,
) -> dsrun_core::Result<Region> {
    let step = if biased { 2 } else { 1 };
    let operands = 2 + 3 * step;
    let value = |index: usize| Some(ValueId::new(index));
    let made = |index: usize| ValueId::new(operands + index);
    let (group, combine) = (MoeGroup { count, first_expert: 0 }, MoeCombine { count, first_expert: 0 });
    let layer = |x: ValueId, index: usize, result: usize| {
        let (weight, experts) = (2 + index * step, Some(made(0)));
        let bias = biased.then(|| ValueId::new(weight + 1));
        let operands = vec![Some(x), value(weight), experts, bias, Some(made(2)), Some(made(3))];
        Call::new(GroupedLinear { dtype, count, first_expert: 0 }, operands, vec![made(result)])
    };
    let calls = vec![
        Call::new(route, vec![value(0), None, None, None, None], vec![made(0), made(1)]),
        Call::new(group, vec![Some(made(0))], vec![made(2), made(3)]),
        layer(ValueId::new(1), 0, 4),
        layer(ValueId::new(1), 1, 5),
        Call::new(activation, vec![Some(made(4)), Some(made(5)), None], vec![made(6)]),
        layer(made(6), 2, 7),
        Call::new(combine, [7, 1, 0].map(|index| Some(made(index))).into(), vec![made(8)]),
    ];
    Region::new("mixture", operands, calls, vec![made(8)])
}

/// The attributes that cases vary.
struct Variant {
    format: WeightFormat,
    inputs: usize,
    hidden: usize,
    biased: bool,
    score: RouterScore,
    limit: f32,
    /// Whether activations are NaN in rare places, and so is a logit.
    nan: bool,
}

pub(super) fn mixture(dtype: DType) -> Vec<Case> {
    let formats = formats(dtype);
    let case = |(number, shape): (usize, &Shape)| {
        let (label, rows, experts, slots, layout) = *shape;
        // Every other shape has dense weights.
        let format = formats[if number % 2 == 0 { 0 } else { number % formats.len() }];
        let variant = Variant {
            format,
            inputs: [64, 96, 32][number % 3],
            hidden: [32, 96, 136][number / 2 % 3],
            biased: number / 2 % 2 == 1,
            score: [RouterScore::Softmax, RouterScore::SoftmaxOfSelected][number / 4 % 2],
            limit: if number % 3 == 2 { 0.5 } else { 0.0 },
            nan: false,
        };
        let id = format!("mixture/{dtype}/{label}");
        let random = Random::named(&id);
        is_wanted(&id).then(|| mixture_case(dtype, id, random, (rows, experts, slots, layout), &variant))
    };
    let special = {
        let (score, format) = (RouterScore::Softmax, WeightFormat::Dense(dtype));
        let variant = Variant { format, inputs: 32, hidden: 40, biased: true, score, limit: 0.0, nan: true };
        let id = format!("mixture/{dtype}/special_nan");
        let random = Random::named(&id);
        mixture_case(dtype, id, random, (33, 6, 2, Layout::default()), &variant)
    };
    SHAPES.iter().enumerate().filter_map(case).chain([special]).collect()
}

pub(super) fn drawn_mixture(dtype: DType, draw: &mut Draw) -> Case {
    let variant = Variant {
        format: draw.pick(&formats(dtype)),
        inputs: draw.pick(&[32, 64, 256]),
        hidden: draw.pick(&[32, 7, 64, 129]),
        biased: draw.sometimes(),
        score: draw.pick(&[RouterScore::Softmax, RouterScore::SoftmaxOfSelected]),
        limit: draw.pick(&[0.0, 0.5]),
        nan: false,
    };
    let shape = drawn_shape(draw);
    mixture_case(dtype, draw.id(), draw.values(), shape, &variant)
}

fn mixture_case(
    dtype: DType,
    id: String,
    mut random: Random,
    (rows, experts, slots, layout): (usize, usize, usize, Layout),
    variant: &Variant,
) -> Case {
    let route = MoeRoute {
        top_k: slots as u32,
        score: variant.score,
        groups: 1,
        top_groups: 1,
        group_score: GroupScore::Max,
        norm: if variant.score == RouterScore::Softmax { RouterNorm::Sum } else { RouterNorm::None },
        eps: 1e-20,
        scale: 1.0,
        threshold: 0.0,
    };
    let function = Nonlinearity::Silu;
    let activation =
        GatedActivation { function, layout: GateLayout::Separate, limit: variant.limit, up_offset: 0.0 };
    let [inputs, hidden] = [variant.inputs, variant.hidden].map(|size| columns_of(variant.format, size));
    let mut logits = random.scaled(DType::F32, &[rows, experts], Values::Uniform, 4.0);
    if variant.nan {
        logits.bits[experts + 1] = f32::NAN.to_bits();
    }
    let values = if variant.nan { Values::Nan } else { Values::Uniform };
    let x = random.tensor(dtype, &[rows, inputs], values);
    let mut layer = |outputs: usize, inputs: usize| {
        let kind = (variant.format, dtype, variant.biased);
        Layer::random(&mut random, kind, [experts, outputs, inputs])
    };
    let (gate, up, down) = (layer(hidden, inputs), layer(hidden, inputs), layer(inputs, hidden));
    let mut reals = Vec::new();
    for (logits, x) in logits.values().chunks(experts).zip(x.values().chunks(inputs)) {
        let routed = moe::route(&route, logits, RouterVectors::default(), None);
        let x: Vec<Real> = x.iter().copied().map(chain::exact).collect();
        let mut sums = vec![Real::sum(0.0, 0.0, slots); inputs];
        for (expert, weight) in routed.experts.iter().zip(&routed.weights) {
            let expert = *expert as usize;
            let (gates, ups) = (gate.of(&x, expert, hidden), up.of(&x, expert, hidden));
            let activate = |(gate, up): (&Real, &Real)| {
                chain::stored(chain::gated(function, f64::from(variant.limit), *gate, *up))
            };
            let activated: Vec<Real> = gates.iter().zip(&ups).map(activate).collect();
            for (sum, term) in sums.iter_mut().zip(down.of(&activated, expert, inputs)) {
                let factor = weight.value.abs();
                sum.value += weight.value * term.value;
                sum.magnitude += factor * term.magnitude + weight.magnitude * term.value.abs();
                sum.inner += factor * term.inner;
                sum.spread = sum.spread.hypot(factor * term.spread);
                sum.terms = sum.terms.max(term.terms);
            }
        }
        reals.extend(sums);
    }
    let gate_of_results = Gate { inner: Some(dtype), exponential: true };
    let expected = Expected::reals(reals).gated(gate_of_results).laid(other(layout, 5), inputs);
    let mut operands = vec![Operand::laid(logits, layout), Operand::laid(x, other(layout, 8))];
    for layer in [gate, up, down] {
        operands.push(Operand::weight(layer.weight));
        operands.extend(layer.bias.map(Operand::tensor));
    }
    let op: Op = region::op(body(dtype, route, experts as u32, activation, variant.biased));
    Case::new(id, CallCase::new(op, operands, vec![expected]))
}
