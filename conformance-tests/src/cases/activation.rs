//! Cases of `activation` and `gated_activation`.

use super::{
    EXPONENTIAL,
    plane::{Plane, drawn, planes, special_planes, threshold_planes},
};
use crate::{
    case::{CallCase, Case, Expected, Operand},
    draw::Draw,
    gate::Gate,
    oracle::activation,
    random::Values,
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
        planes.into_iter().map(|plane| activation_case(dtype, *function, plane)).collect::<Vec<_>>()
    };
    Nonlinearity::ALL.iter().flat_map(of).collect()
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
    GateLayout::ALL.iter().flat_map(of).collect()
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
