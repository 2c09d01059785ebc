//! Cases of `activation` and `gated_activation`.

use super::{
    EXPONENTIAL,
    plane::{Plane, drawn, planes, special_planes, threshold_planes},
};
use crate::{
    case::{CallCase, Case, Expected, Operand},
    draw::Draw,
    gate::Gate,
    oracle::{activation, float},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    op::{Activation, GateLayout, GatedActivation, Nonlinearity},
};

const KINDS: &[Values] = &[Values::Uniform, Values::HeavyTailed, Values::LargeMean, Values::Subnormal];

fn gate(function: Nonlinearity) -> Gate {
    if function == Nonlinearity::Relu { Gate::default() } else { EXPONENTIAL }
}

pub(super) fn activation(dtype: DType) -> Vec<Case> {
    let of = |function: &Nonlinearity| {
        let name = format!("activation_{}", function.name());
        let mut planes = planes(&name, dtype, KINDS, |features| features);
        planes.extend(special_planes(&name, dtype, |features| features));
        planes.extend(threshold_planes(&name, dtype, |features| features));
        let numbers = number_case(dtype, *function);
        let cases = planes.into_iter().map(|plane| activation_case(dtype, *function, plane));
        cases.chain([numbers]).collect::<Vec<_>>()
    };
    Nonlinearity::ALL.iter().flat_map(of).collect()
}

/// Numbers at which functions are easily cut short: both tails in small steps, the ends of the range, infinities, NaN and zeros.
fn numbers(dtype: DType) -> Tensor {
    let tails = (0..240).map(|step| f64::from(step - 200) / 2.0);
    let small = (0..16).map(|step| 2f64.powi(-step) * if step % 2 == 0 { 1.0 } else { -1.0 });
    let (largest, smallest) = (float::largest(dtype), float::smallest_normal(dtype));
    let ends =
        [largest, -largest, smallest, -smallest, 0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
    let all: Vec<f64> = tails.chain(small).chain(ends).collect();
    Tensor::floats(dtype, &[1, all.len()], &all)
}

/// A function of all [`numbers`], without a bias or a limit that would hide some.
fn number_case(dtype: DType, function: Nonlinearity) -> Case {
    let x = numbers(dtype);
    let reals = x.values().into_iter().map(|x| activation::activation(function, 0.0, x, 0.0));
    let expected = Expected::reals(reals).gated(gate(function));
    let id = format!("activation_{}/{dtype}/special_numbers", function.name());
    let operands = vec![Operand::tensor(x), None];
    Case::new(id, CallCase::new(Activation { function, limit: 0.0 }, operands, vec![expected]))
}

pub(super) fn drawn_activation(dtype: DType, draw: &mut Draw) -> Case {
    let function = draw.pick(Nonlinearity::ALL);
    activation_case(dtype, function, drawn(draw, KINDS, |features| features))
}

fn activation_case(dtype: DType, function: Nonlinearity, plane: Plane) -> Case {
    let (mut random, columns) = (plane.random.clone(), plane.features);
    let x = random.tensor(dtype, &[plane.rows, columns], plane.values);
    let bias = (plane.number % 2 == 1).then(|| random.tensor(dtype, &[columns], Values::Uniform));
    let limit = random.pick(&[0.0f32, 0.5, 7.0]);
    let biases = bias.as_ref().map(|bias| bias.values());
    let element = |(index, x): (usize, f64)| {
        let bias = biases.as_ref().map_or(0.0, |bias| bias[index % columns]);
        activation::activation(function, f64::from(limit), x, bias)
    };
    let expected = Expected::reals(x.values().into_iter().enumerate().map(element));
    let expected = expected.gated(gate(function)).laid(plane.other(5), columns);
    let operands = vec![Operand::laid(x, plane.layout), bias.and_then(Operand::tensor)];
    Case::new(plane.id, CallCase::new(Activation { function, limit }, operands, vec![expected]))
}

pub(super) fn gated_activation(dtype: DType) -> Vec<Case> {
    let of = |layout: &GateLayout| {
        let name = format!("gated_activation_{}", layout.name());
        let mut planes = planes(&name, dtype, KINDS, |features| features);
        planes.extend(special_planes(&name, dtype, |features| features));
        planes.extend(threshold_planes(&name, dtype, |features| features));
        planes.into_iter().map(|plane| gated_case(dtype, *layout, plane)).collect::<Vec<_>>()
    };
    let layouts = GateLayout::ALL.iter().flat_map(of);
    layouts.chain(Nonlinearity::ALL.iter().map(|function| gated_number_case(dtype, *function))).collect()
}

/// Gates of all [`numbers`]: one row with ups of usual sizes, one with the same numbers in another order as ups.
fn gated_number_case(dtype: DType, function: Nonlinearity) -> Case {
    let id = format!("gated_activation_separate/{dtype}/special_numbers_{}", function.name());
    let (mut random, row) = (Random::named(&id), numbers(dtype));
    let columns = row.shape[1];
    let usual = random.tensor(dtype, &[columns], Values::Uniform).bits;
    let others = random.shuffled(columns).into_iter().map(|at| row.bits[at]);
    let shape = vec![2, columns];
    let gates = Tensor { dtype, shape: shape.clone(), bits: row.bits.repeat(2) };
    // Infinity is not multiplied by a gate that may be zero: 1 + tanh and 1 + erf are, in f32, from about -5 on.
    let (one, values) = (float::bits(dtype, 1.0), row.values());
    let others = others.zip(values).map(|(up, gate)| {
        let is_infinite = float::value(dtype, up).is_infinite();
        if is_infinite && gate < -4.0 { one } else { up }
    });
    let ups = Tensor { dtype, shape, bits: usual.into_iter().chain(others).collect() };
    let pairs = gates.values().into_iter().zip(ups.values());
    let reals = pairs.map(|(gate, up)| activation::gated(function, 0.0, 0.0, [gate, 0.0], [up, 0.0]));
    let expected = Expected::reals(reals).gated(gate(function));
    let operands = vec![Operand::tensor(gates), Operand::tensor(ups), None];
    let op = GatedActivation { function, layout: GateLayout::Separate, limit: 0.0, up_offset: 0.0 };
    Case::new(id, CallCase::new(op, operands, vec![expected]))
}

pub(super) fn drawn_gated_activation(dtype: DType, draw: &mut Draw) -> Case {
    let layout = draw.pick(GateLayout::ALL);
    gated_case(dtype, layout, drawn(draw, KINDS, |features| features))
}

fn gated_case(dtype: DType, layout: GateLayout, plane: Plane) -> Case {
    let (mut random, columns) = (plane.random.clone(), plane.features);
    let function = Nonlinearity::ALL[plane.number % Nonlinearity::ALL.len()];
    let limit = random.pick(&[0.0f32, 0.5, 7.0]);
    let up_offset = random.pick(&[0.0f32, 1.0, -0.75]);
    let separate = layout == GateLayout::Separate;
    let width = if separate { columns } else { 2 * columns };
    let gates = random.tensor(dtype, &[plane.rows, width], plane.values);
    let ups = separate.then(|| random.tensor(dtype, &[plane.rows, width], plane.values));
    let bias = (plane.number % 2 == 1).then(|| random.tensor(dtype, &[2 * columns], Values::Uniform));
    let biases = bias.as_ref().map_or_else(|| vec![0.0; 2 * columns], |bias| bias.values());
    let (packed, other) = (gates.values(), ups.as_ref().map(|ups| ups.values()));
    // The indices of gate and up of a feature in a packed row, and so in the bias.
    let places = |column: usize| match layout {
        GateLayout::Interleaved => (2 * column, 2 * column + 1),
        GateLayout::Separate | GateLayout::Concatenated => (column, columns + column),
    };
    let element = |index: usize| {
        let (row, (gate, up)) = (index / columns * width, places(index % columns));
        let (g, u) = match &other {
            Some(other) => (packed[index], other[index]),
            None => (packed[row + gate], packed[row + up]),
        };
        let (limit, up_offset) = (f64::from(limit), f64::from(up_offset));
        activation::gated(function, limit, up_offset, [g, biases[gate]], [u, biases[up]])
    };
    let expected = Expected::reals((0..plane.rows * columns).map(element));
    let expected = expected.gated(gate(function)).laid(plane.other(5), columns);
    let operands = vec![
        Operand::laid(gates, plane.layout),
        ups.and_then(|ups| Operand::laid(ups, plane.other(3))),
        bias.and_then(Operand::tensor),
    ];
    let op = GatedActivation { function, layout, limit, up_offset };
    Case::new(plane.id, CallCase::new(op, operands, vec![expected]))
}
