//! Cases of the well-known regions. A region is defined by its body, so its oracle is composed of those of the primitives.

use super::{
    linear::{bias_type, random_weight},
    norm::Head,
    plane::{Plane, drawn, region_planes},
    wanted::is_wanted,
};
use crate::{
    case::{CallCase, Case, Expected, Layout, Operand, Weight},
    draw::Draw,
    gate::Gate,
    oracle::{Real, chain, elementwise, norm},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType, WeightFormat,
    op::{Activation, Add, GateLayout, GatedActivation, Nonlinearity, Op, RmsNorm},
    region::{
        Region,
        well_known::{self, MlpActivation},
    },
};
use std::sync::Arc;

/// Unwraps a region; the bodies used here are well formed.
pub(super) fn op(region: dsrun_core::Result<Region>) -> Op {
    match region {
        Ok(region) => Op::Region(Arc::new(region)),
        Err(error) => unreachable!("a well-known region is malformed: {error}"),
    }
}

pub(super) fn add_rms_norm(dtype: DType) -> Vec<Case> {
    let planes = region_planes("add_rms_norm", dtype, |features| features);
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
        // The norm scales the sum, and with it the error of the f32 addition, by one factor for the whole row.
        let mean_square = values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64;
        let factor = 1.0 / (mean_square + f64::from(eps)).sqrt();
        let stretched = |((real, sum), weight): ((Real, &Real), &f64)| {
            let weight = weight.abs() + f64::from(weight_offset).abs();
            // The sum may be rounded to its storage type before the norm.
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

/// Weight formats of regions by name; `None` is dense. Their number is coprime to the periods of the other attributes that vary
/// from case to case.
const FORMATS: [Option<&str>; 7] =
    [None, Some("q4_0"), None, Some("int8"), Some("q4_1"), Some("q8_0"), Some("int4g32z_f16")];

/// The format of the weight of case `number`.
pub(super) fn format(number: usize, dtype: DType) -> WeightFormat {
    let Some(name) = FORMATS[number % FORMATS.len()] else { return WeightFormat::Dense(dtype) };
    let Some(format) = WeightFormat::from_name(name) else { unreachable!("{name} is no format") };
    format
}

/// Rounds a number of features up so that every format supports it.
fn blocks(features: usize) -> usize {
    features.div_ceil(32) * 32
}

/// The linear layer of a case.
#[derive(Clone, Copy)]
struct Kind {
    /// The number of outputs.
    results: usize,
    format: WeightFormat,
    /// The element type of the bias, if there is one.
    bias: Option<DType>,
}

impl Kind {
    /// The linear layer for a plane, with a format that changes from plane to plane.
    fn of(plane: &Plane, random: &mut Random, dtype: DType, bias: bool) -> Self {
        Self {
            results: 1 + random.below(40),
            format: format(plane.number, dtype),
            bias: bias.then_some(dtype),
        }
    }
}

/// Label, rows, features, outputs, layout, and the format of weights that are not dense.
type Batch = (&'static str, usize, usize, usize, Layout, Option<&'static str>);

/// Batches with dense weights, which a device may run in tiles; and more outputs of packed weights than it runs workgroups at once.
const BATCHES: &[Batch] = &[
    ("batch", 40, 160, 48, Layout::strided(0, 0), None),
    ("batch_extent", 100, 96, 80, Layout { gap: 0, offset: 0, bounded: true, extent: Some(77) }, None),
    ("batch_strided", 128, 32, 16, Layout::strided(16, 1), None),
    ("batch_of_a_row_more", 17, 320, 272, Layout { gap: 8, offset: 0, bounded: true, extent: None }, None),
    ("tiles", 300, 16, 4216, Layout::strided(0, 0), None),
    ("tiles_extent", 270, 8, 4224, Layout { gap: 8, offset: 0, bounded: true, extent: Some(140) }, None),
    ("tiles_of_a_row_more", 129, 640, 264, Layout::strided(8, 0), None),
    ("many_outputs", 1, 256, 4109, Layout::strided(0, 0), Some("int8")),
    ("many_outputs_of_4_bits", 1, 256, 4109, Layout::strided(0, 0), Some("int4g128_f16")),
    ("batch_f32_bias", 40, 160, 48, Layout::strided(0, 0), None),
    ("tiles_f32_bias", 300, 16, 1032, Layout { gap: 8, offset: 0, bounded: true, extent: Some(290) }, None),
];

/// These planes, each with a linear layer.
fn batches(op: &str, dtype: DType) -> Vec<(Plane, Option<Kind>)> {
    let batch = |(number, batch): (usize, &Batch)| {
        let (label, rows, features, results, layout, packed) = *batch;
        let id = format!("{op}/{dtype}/{label}");
        let (random, values) = (Random::named(&id), Values::USUAL[number % 3]);
        let plane = Plane { id, rows, features, layout, values, random, number: 3 * number };
        let format = packed.and_then(WeightFormat::from_name).unwrap_or(WeightFormat::Dense(dtype));
        (plane, Some(Kind { results, format, bias: bias_type(label, dtype, number % 2 == 1) }))
    };
    BATCHES.iter().enumerate().map(batch).filter(|(plane, _)| is_wanted(&plane.id)).collect()
}

/// The gate of a region that may skip a rounding to `dtype` that its body does.
pub(super) fn rounded(dtype: DType) -> Gate {
    Gate { inner: Some(dtype), exponential: false }
}

/// A linear layer in a region.
pub(super) struct Layer {
    weight: Weight,
    elements: Vec<f64>,
    bias: Option<Tensor>,
}

impl Layer {
    pub(super) fn random(
        random: &mut Random,
        format: WeightFormat,
        [outputs, inputs]: [usize; 2],
        bias: Option<DType>,
    ) -> Self {
        let size = 1.0 / (inputs as f64).sqrt();
        let (weight, elements) = random_weight(random, format, [outputs, inputs], size);
        let bias = bias.map(|dtype| random.tensor(dtype, &[outputs], Values::Uniform));
        Self { weight, elements, bias }
    }

    pub(super) fn of(&self, row: &[Real]) -> Vec<Real> {
        let bias = self.bias.as_ref().map(Tensor::values);
        let quantised = self.weight.weight_type.format.is_quantised();
        chain::linear(row, &self.elements, bias.as_deref(), quantised)
    }

    pub(super) fn operands(self) -> impl Iterator<Item = Option<Operand>> {
        [Operand::weight(self.weight)].into_iter().chain(self.bias.map(Operand::tensor))
    }
}

/// The ops in the ids of cases of `norm_linear`, by kind of norm.
const NORM_LINEARS: [(&str, bool); 2] = [("norm_linear", false), ("norm_linear_of_layer_norm", true)];

pub(super) fn norm_linear(dtype: DType) -> Vec<Case> {
    let of = |(name, layer_norm): (&str, bool)| {
        let planes = region_planes(name, dtype, blocks).into_iter().map(|plane| (plane, None));
        planes
            .chain(batches(name, dtype))
            .map(move |(plane, kind)| norm_linear_case(dtype, layer_norm, plane, kind))
    };
    NORM_LINEARS.into_iter().flat_map(of).collect()
}

pub(super) fn drawn_norm_linear(dtype: DType, draw: &mut Draw) -> Case {
    let layer_norm = draw.sometimes();
    norm_linear_case(dtype, layer_norm, drawn(draw, &Values::USUAL, blocks), None)
}

fn norm_linear_case(dtype: DType, layer_norm: bool, plane: Plane, kind: Option<Kind>) -> Case {
    let (mut random, k) = (plane.random.clone(), plane.features);
    let usual = Kind::of(&plane, &mut random, dtype, plane.number % 2 == 1);
    let Kind { results: n, format, bias } = kind.unwrap_or(usual);
    let x = random.tensor(dtype, &[plane.rows, k], plane.values);
    let head = Head::random(&mut random, dtype, k, layer_norm);
    let layer = Layer::random(&mut random, format, [n, k], bias);
    let to = if plane.number % 3 == 2 { DType::F32 } else { dtype };
    let reals = x.values().chunks(k).flat_map(|row| layer.of(&head.of(row))).collect::<Vec<_>>();
    let expected = Expected::reals(reals).gated(rounded(dtype)).laid(plane.other(3), n);
    let op = op(well_known::norm_linear(head.norm, to, bias.is_some()));
    let operands = [Operand::laid(x, plane.layout)].into_iter();
    let operands = operands.chain(head.operands()).chain(layer.operands()).collect();
    Case::new(plane.id, CallCase::new(op, operands, vec![expected]))
}

pub(super) fn linear_add(dtype: DType) -> Vec<Case> {
    let planes = region_planes("linear_add", dtype, blocks);
    let planes = planes.into_iter().map(|plane| (plane, None)).chain(batches("linear_add", dtype));
    planes.map(|(plane, kind)| linear_add_case(dtype, plane, kind)).collect()
}

pub(super) fn drawn_linear_add(dtype: DType, draw: &mut Draw) -> Case {
    linear_add_case(dtype, drawn(draw, &Values::USUAL, blocks), None)
}

fn linear_add_case(dtype: DType, plane: Plane, kind: Option<Kind>) -> Case {
    let (mut random, k) = (plane.random.clone(), plane.features);
    let usual = Kind::of(&plane, &mut random, dtype, plane.number % 2 == 1);
    let Kind { results: n, format, bias } = kind.unwrap_or(usual);
    let x = random.tensor(dtype, &[plane.rows, k], plane.values);
    let layer = Layer::random(&mut random, format, [n, k], bias);
    let residual = random.tensor(dtype, &[plane.rows, n], Values::HeavyTailed);
    let alpha = random.pick(&[1.0f32, 1.0, -0.5]);
    let mut reals = Vec::new();
    for (x, residuals) in x.values().chunks(k).zip(residual.values().chunks(n)) {
        let x: Vec<Real> = x.iter().copied().map(chain::exact).collect();
        let sums = layer.of(&x).into_iter().zip(residuals);
        reals.extend(sums.map(|(y, a)| chain::add(*a, chain::stored(y), f64::from(alpha))));
    }
    let expected = Expected::reals(reals).gated(rounded(dtype)).laid(plane.other(3), n);
    let operands = [Operand::laid(x, plane.layout)].into_iter().chain(layer.operands());
    let operands = operands.chain([Operand::laid(residual, plane.other(5))]).collect();
    let op = op(well_known::linear_add(dtype, bias.is_some(), Add { alpha }));
    Case::new(plane.id, CallCase::new(op, operands, vec![expected]))
}

/// The gate layouts of an MLP; `None` is an MLP without a gate.
const GATES: [Option<GateLayout>; 3] = [None, Some(GateLayout::Concatenated), Some(GateLayout::Interleaved)];

pub(super) fn mlp_input(dtype: DType) -> Vec<Case> {
    let of = |gate: Option<GateLayout>| {
        let name = gate.map_or("mlp_input_plain".into(), |layout| format!("mlp_input_{}", layout.name()));
        let planes = region_planes(&name, dtype, blocks).into_iter().map(|plane| (plane, None));
        planes.chain(batches(&name, dtype)).map(move |(plane, kind)| mlp_input_case(dtype, gate, plane, kind))
    };
    GATES.into_iter().flat_map(of).collect()
}

pub(super) fn drawn_mlp_input(dtype: DType, draw: &mut Draw) -> Case {
    let gate = draw.pick(&GATES);
    mlp_input_case(dtype, gate, drawn(draw, &Values::USUAL, blocks), None)
}

fn mlp_input_case(dtype: DType, gate: Option<GateLayout>, plane: Plane, kind: Option<Kind>) -> Case {
    let (mut random, k, number) = (plane.random.clone(), plane.features, plane.number);
    let usual = Kind::of(&plane, &mut random, dtype, number / 2 % 2 == 1);
    let Kind { results: n, format, bias } = kind.unwrap_or(usual);
    let x = random.tensor(dtype, &[plane.rows, k], plane.values);
    let head = Head::random(&mut random, dtype, k, number % 2 == 1);
    let function = Nonlinearity::ALL[number / 3 % 4];
    let outputs = if gate.is_some() { 2 * n } else { n };
    let layer = Layer::random(&mut random, format, [outputs, k], bias);
    let limit = random.pick(&[0.0f32, 0.0, 7.0]);
    let activation: MlpActivation = match gate {
        None => Activation { function, limit }.into(),
        Some(layout) => GatedActivation { function, layout, limit, up_offset: 0.0 }.into(),
    };
    let activate = |product: &[Real], column: usize| {
        let limit = f64::from(limit);
        let (first, second) = match gate {
            None => return chain::activation(function, limit, product[column]),
            Some(GateLayout::Interleaved) => (2 * column, 2 * column + 1),
            Some(_) => (column, n + column),
        };
        chain::gated(function, limit, product[first], product[second])
    };
    let mut reals = Vec::new();
    for row in x.values().chunks(k) {
        let product: Vec<Real> = layer.of(&head.of(row)).into_iter().map(chain::stored).collect();
        reals.extend((0..n).map(|column| activate(&product, column)));
    }
    let gate = Gate { exponential: function != Nonlinearity::Relu, ..rounded(dtype) };
    let expected = Expected::reals(reals).gated(gate).laid(plane.other(3), n);
    let op = op(well_known::mlp_input(head.norm, dtype, bias.is_some(), activation));
    let operands = [Operand::laid(x, plane.layout)].into_iter();
    let operands = operands.chain(head.operands()).chain(layer.operands()).collect();
    Case::new(plane.id, CallCase::new(op, operands, vec![expected]))
}
