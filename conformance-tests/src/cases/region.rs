//! The well-known regions. A region means its body, so the oracle is put together from those of the primitives.

use super::{
    linear::random_weight,
    plane::{Plane, drawn, planes},
};
use crate::{
    case::{CallCase, Case, Expected, Operand},
    draw::Draw,
    gate::Gate,
    oracle::{Real, elementwise, linear, norm},
    random::Values,
};
use dsrun_core::{
    BlockFormat, DType, WeightFormat,
    op::{Add, Op, RmsNorm},
    region::{Region, well_known},
};
use std::sync::Arc;

/// The bodies are well formed, so there is always a region.
fn op(region: dsrun_core::Result<Region>) -> Op {
    match region {
        Ok(region) => Op::Region(Arc::new(region)),
        Err(error) => unreachable!("a well-known region is malformed: {error}"),
    }
}

pub(super) fn add_rms_norm(dtype: DType) -> Vec<Case> {
    let planes = planes("add_rms_norm", dtype, &Values::USUAL, |features| features);
    planes.into_iter().map(|plane| add_rms_norm_case(dtype, plane)).collect()
}

pub(super) fn drawn_add_rms_norm(dtype: DType, draw: &mut Draw) -> Case {
    add_rms_norm_case(dtype, drawn(draw, &Values::USUAL, |features| features))
}

fn add_rms_norm_case(dtype: DType, plane: Plane) -> Case {
    let (mut random, columns) = (plane.random.clone(), plane.features);
    let shape = [plane.rows, columns];
    let (a, b) = (random.tensor(dtype, &shape, plane.values), random.tensor(dtype, &shape, plane.values));
    let weight = random.tensor(dtype, &[columns], Values::HeavyTailed);
    let (alpha, eps) = (random.pick(&[1.0f32, -0.5]), random.pick(&[1e-5f32, 1e-6]));
    let weight_offset = random.pick(&[0.0f32, 1.0]);
    let (av, bv, weights) = (a.values(), b.values(), weight.values());
    let sums: Vec<Real> =
        av.iter().zip(&bv).map(|(a, b)| elementwise::add(*a, *b, 0.0, 0.0, f64::from(alpha))).collect();
    let mut normed = Vec::new();
    for row in sums.chunks(columns) {
        let values: Vec<f64> = row.iter().map(|real| real.value).collect();
        let reals = norm::rms_norm(&values, &weights, f64::from(eps), f64::from(weight_offset));
        // The norm stretches the sum, and with it the error of f32 addition, by one factor for the whole row.
        let mean_square = values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64;
        let factor = 1.0 / (mean_square + f64::from(eps)).sqrt();
        let stretched = |((real, sum), weight): ((Real, &Real), &f64)| {
            let weight = weight.abs() + f64::from(weight_offset).abs();
            // The sum may be rounded to its storage type before the norm reads it.
            let inner = sum.value.abs() * factor * weight;
            Real { magnitude: sum.magnitude * factor * weight, ..real }.rounded_inside(inner, inner)
        };
        normed.extend(reals.into_iter().zip(row).zip(&weights).map(stretched));
    }
    let results = vec![
        Expected::reals(sums).laid(plane.other(5), columns),
        Expected::reals(normed)
            .gated(Gate { inner: Some(dtype), exponential: false })
            .laid(plane.other(2), columns),
    ];
    let operands =
        vec![Operand::laid(a, plane.layout), Operand::laid(b, plane.other(3)), Operand::tensor(weight)];
    let op = op(well_known::add_rms_norm(Add { alpha }, RmsNorm { eps, weight_offset }));
    Case::new(plane.id, CallCase::new(op, operands, results))
}

const FORMATS: [Option<BlockFormat>; 4] =
    [None, Some(BlockFormat::Q4_0), Some(BlockFormat::Q4_1), Some(BlockFormat::Q8_0)];

/// Features that every weight format can hold.
fn blocks(features: usize) -> usize {
    features.div_ceil(32) * 32
}

pub(super) fn norm_linear(dtype: DType) -> Vec<Case> {
    let planes = planes("norm_linear", dtype, &Values::USUAL, blocks);
    planes.into_iter().map(|plane| norm_linear_case(dtype, plane)).collect()
}

pub(super) fn drawn_norm_linear(dtype: DType, draw: &mut Draw) -> Case {
    norm_linear_case(dtype, drawn(draw, &Values::USUAL, blocks))
}

fn norm_linear_case(dtype: DType, plane: Plane) -> Case {
    let (mut random, k) = (plane.random.clone(), plane.features);
    let n = 1 + random.below(40);
    let format = FORMATS[plane.number % 4].map_or(WeightFormat::Dense(dtype), WeightFormat::Block);
    let x = random.tensor(dtype, &[plane.rows, k], plane.values);
    let norm_weight = random.tensor(dtype, &[k], Values::Uniform);
    let (weight, elements) = random_weight(&mut random, format, [n, k], 1.0 / (k as f64).sqrt(), dtype);
    let bias = (plane.number % 2 == 1).then(|| random.tensor(dtype, &[n], Values::Uniform));
    let to = if plane.number % 3 == 2 { DType::F32 } else { dtype };
    let eps = 1e-5f32;
    let (values, norm_weights) = (x.values(), norm_weight.values());
    let biases = bias.as_ref().map(|bias| bias.values());
    let mut reals = Vec::new();
    for row in values.chunks(k) {
        let normed: Vec<f64> =
            norm::rms_norm(row, &norm_weights, f64::from(eps), 0.0).iter().map(|real| real.value).collect();
        for real in linear::linear(&normed, &elements, biases.as_deref(), [1, n, k]) {
            // The normed row may be rounded, and so may dequantised weights.
            let roundings = if format.is_quantised() { 2.0f64 } else { 1.0 };
            reals.push(real.rounded_inside(roundings * real.inner, roundings.sqrt() * real.spread));
        }
    }
    let gate = Gate { inner: Some(dtype), exponential: false };
    let expected = Expected::reals(reals).gated(gate).laid(plane.other(3), n);
    let bias_there = bias.is_some();
    let mut operands =
        vec![Operand::laid(x, plane.layout), Operand::tensor(norm_weight), Operand::weight(weight)];
    operands.extend(bias.map(Operand::tensor));
    let op = op(well_known::norm_linear(RmsNorm { eps, weight_offset: 0.0 }, to, bias_there));
    Case::new(plane.id, CallCase::new(op, operands, vec![expected]))
}
