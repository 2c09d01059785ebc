//! Cases of `rms_norm` and `layer_norm`.

use super::plane::{Plane, drawn, planes, special_planes, threshold_planes};
use crate::{
    case::{CallCase, Case, Expected, Layout, Operand},
    draw::Draw,
    oracle::{Real, chain, norm},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType,
    op::{LayerNorm, RmsNorm},
    region::well_known::Norm,
};

const EPSILONS: [f32; 3] = [1e-5, 1e-6, 0.1];

/// A group width that divides the features: a row of per-head norms has several groups.
fn width(features: usize, number: usize) -> usize {
    let groups = [1, 1, 2, 3, 7, 4][number % 6];
    if features.is_multiple_of(groups) { features / groups } else { features }
}

const KINDS: &[Values] = &[Values::Uniform, Values::HeavyTailed, Values::LargeMean, Values::Subnormal];

pub(super) fn rms_norm(dtype: DType) -> Vec<Case> {
    let mut planes = planes("rms_norm", dtype, KINDS, |features| features);
    // More rows than a device has resident blocks, so that each block loops.
    let id = format!("rms_norm/{dtype}/rows_in_turns");
    let layout = Layout { gap: 8, offset: 0, bounded: true, extent: Some(4290) };
    let (random, values) = (Random::named(&id), Values::Uniform);
    planes.extend(special_planes("rms_norm", dtype, |features| features));
    planes.extend(threshold_planes("rms_norm", dtype, |features| features));
    planes.push(Plane { id, rows: 4301, features: 40, layout, values, random, number: 0 });
    let small = small_values("rms_norm", dtype);
    let cases = planes.into_iter().map(|plane| rms_case(dtype, plane, None));
    cases.chain([rms_case(dtype, small, Some(SMALL))]).collect()
}

pub(super) fn drawn_rms_norm(dtype: DType, draw: &mut Draw) -> Case {
    rms_case(dtype, drawn(draw, KINDS, |features| features), None)
}

/// A factor of the values and an eps that is small beside their squares, though no model has one so small.
const SMALL: (f64, f32) = (0.01, 1e-9);

/// The plane for [`SMALL`].
fn small_values(op: &str, dtype: DType) -> Plane {
    let id = format!("{op}/{dtype}/small_eps");
    let random = Random::named(&id);
    Plane { id, rows: 5, features: 60, layout: Layout::default(), values: Values::Uniform, random, number: 2 }
}

fn rms_case(dtype: DType, plane: Plane, small: Option<(f64, f32)>) -> Case {
    let (mut random, columns) = (plane.random.clone(), plane.features);
    let width = width(columns, plane.number);
    let x = random.scaled(dtype, &[plane.rows, columns], plane.values, small.map_or(1.0, |small| small.0));
    // Some models store norm weights in f32 and activations in another type.
    let weight_type = if plane.number % 5 == 4 { DType::F32 } else { dtype };
    let weight = random.tensor(weight_type, &[width], Values::HeavyTailed);
    let (eps, weight_offset) = (random.pick(&EPSILONS), random.pick(&[0.0f32, 1.0]));
    let eps = small.map_or(eps, |small| small.1);
    let (values, weights) = (x.values(), weight.values());
    let groups = values.chunks(width);
    let reals = groups.flat_map(|x| norm::rms_norm(x, &weights, f64::from(eps), f64::from(weight_offset)));
    let expected = Expected::reals(reals).laid(plane.other(5), columns);
    let operands = vec![Operand::laid(x, plane.layout), Operand::tensor(weight)];
    Case::new(plane.id, CallCase::new(RmsNorm { eps, weight_offset }, operands, vec![expected]))
}

pub(super) fn layer_norm(dtype: DType) -> Vec<Case> {
    let mut planes = planes("layer_norm", dtype, &Values::USUAL, |features| features);
    planes.extend(special_planes("layer_norm", dtype, |features| features));
    planes.extend(threshold_planes("layer_norm", dtype, |features| features));
    let small = small_values("layer_norm", dtype);
    let cases = planes.into_iter().map(|plane| layer_case(dtype, plane, None));
    cases.chain([layer_case(dtype, small, Some(SMALL))]).collect()
}

pub(super) fn drawn_layer_norm(dtype: DType, draw: &mut Draw) -> Case {
    layer_case(dtype, drawn(draw, &Values::USUAL, |features| features), None)
}

fn layer_case(dtype: DType, plane: Plane, small: Option<(f64, f32)>) -> Case {
    let (mut random, columns) = (plane.random.clone(), plane.features);
    let x = random.scaled(dtype, &[plane.rows, columns], plane.values, small.map_or(1.0, |small| small.0));
    let weight =
        plane.number.is_multiple_of(2).then(|| random.tensor(dtype, &[columns], Values::HeavyTailed));
    let bias = (!plane.number.is_multiple_of(3)).then(|| random.tensor(dtype, &[columns], Values::Uniform));
    let eps = small.map_or_else(|| random.pick(&EPSILONS), |small| small.1);
    let (weights, biases) = (weight.as_ref().map(|w| w.values()), bias.as_ref().map(|b| b.values()));
    let values = x.values();
    let rows = values.chunks(columns.max(1));
    let reals = rows.flat_map(|x| norm::layer_norm(x, weights.as_deref(), biases.as_deref(), f64::from(eps)));
    let expected = Expected::reals(reals).laid(plane.other(5), columns);
    let operands = vec![
        Operand::laid(x, plane.layout),
        weight.and_then(Operand::tensor),
        bias.and_then(Operand::tensor),
    ];
    Case::new(plane.id, CallCase::new(LayerNorm { eps }, operands, vec![expected]))
}

/// The first norm of a region, and its weight and bias.
pub(super) struct Head {
    pub(super) norm: Norm,
    vectors: Vec<Tensor>,
}

impl Head {
    /// An RMS norm or a layer norm over `features`.
    pub(super) fn random(random: &mut Random, dtype: DType, features: usize, layer: bool) -> Self {
        let eps = 1e-5f32;
        let mut vector = || random.tensor(dtype, &[features], Values::Uniform);
        match layer {
            false => Self { norm: RmsNorm { eps, weight_offset: 0.0 }.into(), vectors: vec![vector()] },
            true => Self { norm: LayerNorm { eps }.into(), vectors: vec![vector(), vector()] },
        }
    }

    /// The normalised row, which may be rounded before the next op reads it.
    pub(super) fn of(&self, row: &[f64]) -> Vec<Real> {
        let vectors: Vec<Vec<f64>> = self.vectors.iter().map(Tensor::values).collect();
        let normed = match self.norm {
            Norm::Rms(op) => norm::rms_norm(row, &vectors[0], f64::from(op.eps), f64::from(op.weight_offset)),
            Norm::Layer(op) => norm::layer_norm(row, Some(&vectors[0]), Some(&vectors[1]), f64::from(op.eps)),
        };
        normed.into_iter().map(chain::stored).collect()
    }

    pub(super) fn operands(self) -> impl Iterator<Item = Option<Operand>> {
        self.vectors.into_iter().map(Operand::tensor)
    }
}
