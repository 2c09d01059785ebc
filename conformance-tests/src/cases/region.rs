//! Cases of the well-known regions. A region is defined by its body, so its oracle is composed of those of the primitives.

use super::{
    linear::random_weight,
    norm::Head,
    plane::{Plane, ROWS, drawn, drawn_layout, region_planes},
    wanted::is_wanted,
};
use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand, Weight},
    draw::Draw,
    gate::Gate,
    oracle::{Real, cache, chain, elementwise, norm},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType, WeightFormat,
    op::{Activation, Add, GateLayout, GatedActivation, Nonlinearity, Op, RmsNorm, Rope, RopePairing},
    region::{
        Region,
        well_known::{self, AttentionInput, Heads, MlpActivation},
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
fn format(number: usize, dtype: DType) -> WeightFormat {
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
    bias: bool,
}

impl Kind {
    /// The linear layer for a plane, with a format that changes from plane to plane.
    fn of(plane: &Plane, random: &mut Random, dtype: DType, bias: bool) -> Self {
        Self { results: 1 + random.below(40), format: format(plane.number, dtype), bias }
    }
}

/// Label, rows, features, outputs and layout of batches with dense weights, which a device may run in tiles.
const BATCHES: &[(&str, usize, usize, usize, Layout)] = &[
    ("batch", 40, 160, 48, Layout::strided(0, 0)),
    ("batch_extent", 100, 96, 80, Layout { gap: 0, offset: 0, bounded: true, extent: Some(77) }),
    ("batch_strided", 128, 32, 16, Layout::strided(16, 1)),
    ("batch_of_a_row_more", 17, 320, 272, Layout { gap: 8, offset: 0, bounded: true, extent: None }),
    ("tiles", 300, 16, 4216, Layout::strided(0, 0)),
    ("tiles_extent", 270, 8, 4224, Layout { gap: 8, offset: 0, bounded: true, extent: Some(140) }),
    ("tiles_of_a_row_more", 129, 640, 264, Layout::strided(8, 0)),
];

/// These planes, each with a linear layer.
fn batches(op: &str, dtype: DType) -> Vec<(Plane, Option<Kind>)> {
    let batch = |(number, batch): (usize, &(&str, usize, usize, usize, Layout))| {
        let (label, rows, features, results, layout) = *batch;
        let id = format!("{op}/{dtype}/{label}");
        let (random, values) = (Random::named(&id), Values::USUAL[number % 3]);
        let plane = Plane { id, rows, features, layout, values, random, number: 3 * number };
        (plane, Some(Kind { results, format: WeightFormat::Dense(dtype), bias: number % 2 == 1 }))
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
        dtype: DType,
        bias: bool,
    ) -> Self {
        let size = 1.0 / (inputs as f64).sqrt();
        let (weight, elements) = random_weight(random, format, [outputs, inputs], size);
        let bias = bias.then(|| random.tensor(dtype, &[outputs], Values::Uniform));
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
    let layer = Layer::random(&mut random, format, [n, k], dtype, bias);
    let to = if plane.number % 3 == 2 { DType::F32 } else { dtype };
    let reals = x.values().chunks(k).flat_map(|row| layer.of(&head.of(row))).collect::<Vec<_>>();
    let expected = Expected::reals(reals).gated(rounded(dtype)).laid(plane.other(3), n);
    let op = op(well_known::norm_linear(head.norm, to, bias));
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
    let layer = Layer::random(&mut random, format, [n, k], dtype, bias);
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
    let op = op(well_known::linear_add(dtype, bias, Add { alpha }));
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
    let layer = Layer::random(&mut random, format, [outputs, k], dtype, bias);
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
    let op = op(well_known::mlp_input(head.norm, dtype, bias, activation));
    let operands = [Operand::laid(x, plane.layout)].into_iter();
    let operands = operands.chain(head.operands()).chain(layer.operands()).collect();
    Case::new(plane.id, CallCase::new(op, operands, vec![expected]))
}

/// Rows and hidden size; query heads, KV heads, head size and rotated pairs; layout of the activations.
pub(super) type HeadsOf = ([usize; 2], [usize; 4], Layout);

const fn layout(gap: usize, extent: Option<usize>) -> Layout {
    Layout { gap, offset: 1, bounded: extent.is_some(), extent }
}

const HEADS: &[(&str, HeadsOf)] = &[
    ("no_rows", ([0, 64], [2, 1, 16, 8], layout(0, None))),
    ("one_row", ([1, 96], [3, 1, 32, 16], layout(0, None))),
    ("seven_rows", ([7, 64], [4, 4, 16, 8], layout(0, None))),
    ("grouped", ([5, 160], [6, 2, 64, 32], layout(0, None))),
    ("head_80", ([3, 64], [2, 2, 80, 40], layout(0, None))),
    ("head_96_partly", ([4, 96], [2, 1, 96, 16], layout(0, None))),
    ("head_128", ([2, 128], [2, 1, 128, 64], layout(0, None))),
    ("many_rows", ([67, 64], [2, 1, 16, 8], layout(0, None))),
    ("batch_extent", ([40, 128], [6, 2, 128, 64], layout(0, Some(33)))),
    ("strided", ([6, 64], [2, 1, 16, 8], layout(16, None))),
    ("extent", ([9, 64], [3, 1, 16, 8], layout(8, Some(6)))),
    ("extent_of_nothing", ([6, 64], [2, 1, 16, 8], layout(0, Some(0)))),
];

const HALVES: Variant =
    Variant { layer_norm: false, bias: false, head_norms: None, pairing: Some(RopePairing::Halves) };

/// Cases with many rows or outputs.
const MANY_HEADS: &[(&str, HeadsOf, Variant)] = &[
    // More rows than a device has resident blocks, so that each block loops.
    ("rows_in_turns", ([4301, 32], [2, 1, 32, 16], layout(8, Some(4290))), HALVES),
    (
        "rows_in_turns_neighbours",
        ([4301, 32], [2, 1, 32, 16], layout(0, None)),
        Variant { pairing: Some(RopePairing::Neighbours), head_norms: Some(NormSpan::EachHead), ..HALVES },
    ),
    (
        "rows_in_turns_normed_together",
        ([4301, 32], [3, 3, 32, 16], layout(0, Some(4299))),
        Variant { head_norms: Some(NormSpan::AllHeads), ..HALVES },
    ),
    // Norms over more heads than a block has, and blocks with heads of both queries and keys.
    (
        "many_normed_together",
        ([9, 32], [23, 23, 64, 32], layout(0, Some(7))),
        Variant { head_norms: Some(NormSpan::AllHeads), ..HALVES },
    ),
    (
        "grouped_normed_together",
        ([5, 32], [40, 8, 128, 64], layout(8, None)),
        Variant { bias: true, head_norms: Some(NormSpan::AllHeads), ..HALVES },
    ),
    (
        "rows_in_turns_unturned",
        ([4301, 32], [2, 1, 16, 8], layout(0, Some(4300))),
        Variant { pairing: None, ..HALVES },
    ),
    // So many outputs that a device may finish heads in the epilogue of the product.
    ("tiles", ([150, 32], [44, 11, 128, 64], layout(0, Some(141))), HALVES),
    (
        "tiles_bias",
        ([260, 32], [29, 29, 64, 32], layout(8, None)),
        Variant { bias: true, layer_norm: true, ..HALVES },
    ),
    (
        "tiles_unturned",
        ([140, 32], [88, 22, 64, 32], layout(0, Some(0))),
        Variant { pairing: None, ..HALVES },
    ),
    (
        "tiles_unturned_bias",
        ([140, 32], [88, 22, 64, 32], layout(0, Some(139))),
        Variant { pairing: None, bias: true, ..HALVES },
    ),
    // The same for the rows of a decode batch, from few outputs to many.
    ("sequences", ([29, 160], [8, 2, 128, 64], layout(0, Some(26))), HALVES),
    ("sequences_bias", ([17, 72], [9, 3, 64, 32], layout(8, None)), Variant { bias: true, ..HALVES }),
    ("sequences_half_the_device", ([70, 96], [32, 4, 64, 32], layout(0, Some(65))), HALVES),
    ("sequences_a_tile_each", ([48, 32], [36, 3, 128, 64], layout(8, Some(47))), HALVES),
    ("sequences_two_tiles_each", ([128, 32], [60, 4, 128, 64], layout(0, None)), HALVES),
    ("sequences_unturned", ([33, 64], [6, 3, 64, 32], layout(0, None)), Variant { pairing: None, ..HALVES }),
];

/// What the norms of queries and keys cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormSpan {
    EachHead,
    AllHeads,
}

/// The attributes that cases of `attention_input` vary.
#[derive(Clone, Copy, Debug)]
pub(super) struct Variant {
    layer_norm: bool,
    pub(super) bias: bool,
    head_norms: Option<NormSpan>,
    pairing: Option<RopePairing>,
}

impl Variant {
    /// Variant `number` of [`Self::COUNT`].
    pub(super) fn number(number: usize) -> Self {
        let pairings = [Some(RopePairing::Halves), Some(RopePairing::Neighbours), None];
        let pairing = pairings[number % 3];
        let [layer_norm, bias] = [3, 6].map(|unit| number / unit % 2 == 1);
        let head_norms = [None, Some(NormSpan::EachHead), Some(NormSpan::AllHeads)][number / 12 % 3];
        Self { layer_norm, bias, head_norms, pairing }
    }

    pub(super) const COUNT: usize = 36;

    /// The label of the variant.
    fn label(self) -> String {
        let norm = if self.layer_norm { "layer_norm" } else { "rms_norm" };
        let bias = if self.bias { "_bias" } else { "" };
        let head_norms = match self.head_norms {
            None => "",
            Some(NormSpan::EachHead) => "_head_norms",
            Some(NormSpan::AllHeads) => "_norms_over_heads",
        };
        format!("{norm}{bias}{head_norms}_{}", self.pairing.map_or("no_rope", RopePairing::name))
    }
}

pub(super) fn attention_input(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for number in 0..Variant::COUNT {
        let variant = Variant::number(number);
        let heads = ([6, 64], [4, 2, 16, 8], layout(0, Some(5)));
        let id = format!("attention_input/{dtype}/{}", variant.label());
        if is_wanted(&id) {
            let random = Random::named(&id);
            cases.push(attention_case(id, dtype, heads, variant, random, number));
        }
    }
    for (number, (label, heads)) in HEADS.iter().copied().enumerate() {
        // Steps of 7 go through all variants before one is repeated.
        let variant = Variant::number(7 * number);
        let id = format!("attention_input/{dtype}/{label}");
        if is_wanted(&id) {
            let random = Random::named(&id);
            cases.push(attention_case(id, dtype, heads, variant, random, number));
        }
    }
    for (label, heads, variant) in MANY_HEADS.iter().copied() {
        let id = format!("attention_input/{dtype}/{label}");
        if is_wanted(&id) {
            let random = Random::named(&id);
            cases.push(attention_case(id, dtype, heads, variant, random, 0));
        }
    }
    cases
}

pub(super) fn drawn_attention_input(dtype: DType, draw: &mut Draw) -> Case {
    let head = draw.pick(&[16, 2, 6, 64, 80, 96, 128]);
    let (kv_heads, groups, pairs) = (1 + draw.below(3), 1 + draw.below(4), head / 2 - draw.below(2));
    let (rows, hidden) = (draw.pick(ROWS).min(40), 32 * (1 + draw.below(4)));
    let layout = drawn_layout(draw, rows);
    let heads = ([rows, hidden], [kv_heads * groups, kv_heads, head, pairs], layout);
    let (variant, number) = (Variant::number(draw.below(Variant::COUNT)), draw.below(60));
    attention_case(draw.id(), dtype, heads, variant, draw.values(), number)
}

fn attention_case(
    id: String,
    dtype: DType,
    ([rows, hidden], sizes, layout): HeadsOf,
    variant: Variant,
    mut random: Random,
    number: usize,
) -> Case {
    let x = random.tensor(dtype, &[rows, hidden], Values::USUAL[number % 3]);
    let norm = Head::random(&mut random, dtype, hidden, variant.layer_norm);
    let outputs = outputs(sizes);
    let layer = Layer::random(&mut random, format(number, dtype), [outputs, hidden], dtype, variant.bias);
    let heads = HeadsCase::random(&mut random, dtype, (rows, sizes, layout), variant, number);
    let products: Vec<Vec<Real>> = x.values().chunks(hidden).map(|x| layer.of(&norm.of(x))).collect();
    let results = heads.expected(&products);
    let input = AttentionInput { norm: norm.norm, dtype, bias: variant.bias, heads: heads.attributes() };
    let mut operands = vec![Operand::laid(x, layout)];
    operands.extend(norm.operands());
    operands.extend(layer.operands());
    operands.extend(heads.operands());
    Case::new(id, CallCase::new(op(well_known::attention_input(input)), operands, results))
}

/// The number of columns of queries, keys and values together.
pub(super) fn outputs([heads, kv_heads, head, _]: [usize; 4]) -> usize {
    (heads + 2 * kv_heads) * head
}

/// The operands that turn a product into queries, keys and values.
pub(super) struct HeadsCase {
    dtype: DType,
    rows: usize,
    sizes: [usize; 4],
    layout: Layout,
    pairing: Option<RopePairing>,
    /// The weights of the norms of queries and keys, which cover as many elements.
    norms: Option<[Tensor; 2]>,
    scale: f32,
    frequencies: Tensor,
    positions: Vec<i32>,
    slots: Vec<i32>,
    block: usize,
    caches: [Tensor; 2],
}

const HEAD_NORM: RmsNorm = RmsNorm { eps: 1e-6, weight_offset: 0.0 };

impl HeadsCase {
    pub(super) fn random(
        random: &mut Random,
        dtype: DType,
        (rows, sizes, layout): (usize, [usize; 4], Layout),
        variant: Variant,
        number: usize,
    ) -> Self {
        let [query_heads, kv_heads, head, pairs] = sizes;
        let norms = variant.head_norms.map(|span| {
            [query_heads, kv_heads].map(|heads| {
                let heads = if span == NormSpan::AllHeads { heads } else { 1 };
                random.tensor(dtype, &[heads * head], Values::Uniform)
            })
        });
        let scale = random.pick(&[1.0f32, 1.25]);
        let frequencies: Vec<f64> =
            (0..pairs).map(|pair| 10_000f64.powf(-(pair as f64) / pairs as f64)).collect();
        // Every fourth row is padding, without position and slot. Another row has a position and no slot.
        let padded = |row: usize| row % 4 == 2;
        let (pages, block) = (3 + rows / 4, 4);
        let free = random.shuffled(pages * block);
        let slot = |row: usize| if padded(row) || row % 8 == 5 { -1 } else { free[row] as i32 };
        let position = |row: usize| if padded(row) { -1 } else { 40 + row as i32 };
        // A cache of another type than the activations adds a second rounding.
        let cache_type = match dtype {
            DType::F32 if number % 5 == 4 => DType::F16,
            _ if number % 5 == 4 => DType::F32,
            _ => dtype,
        };
        let shape = [pages, kv_heads, block, head];
        Self {
            dtype,
            rows,
            sizes,
            layout,
            pairing: variant.pairing,
            norms,
            scale,
            frequencies: Tensor::floats(DType::F32, &[pairs], &frequencies),
            positions: (0..rows).map(position).collect(),
            slots: (0..rows).map(slot).collect(),
            block,
            caches: [(); 2].map(|()| random.tensor(cache_type, &shape, Values::Uniform)),
        }
    }

    fn columns(&self) -> [usize; 3] {
        let [heads, kv_heads, head, _] = self.sizes;
        [heads, kv_heads, kv_heads].map(|heads| heads * head)
    }

    pub(super) fn attributes(&self) -> Heads {
        let [heads, kv_heads, ..] = self.sizes;
        let rope = |heads: usize, pairing| Rope { heads: heads as u32, pairing, scale: self.scale };
        Heads {
            columns: self.columns().map(|columns| columns as u32),
            head_norms: self.norms.is_some().then_some([HEAD_NORM; 2]),
            ropes: self.pairing.map(|pairing| [rope(heads, pairing), rope(kv_heads, pairing)]),
        }
    }

    /// The rotated queries (`which` 0) or keys (1) of a row of the product.
    fn rotated(&self, features: &[Real], which: usize, position: i32) -> Vec<Real> {
        let head = self.sizes[2];
        let mut features = features.to_vec();
        if let Some(weights) = &self.norms {
            let weight = weights[which].values();
            let normed = features
                .chunks(weight.len())
                .flat_map(|x| chain::rms_norm(x, &weight, f64::from(HEAD_NORM.eps), 0.0));
            features = normed.collect();
        }
        if let Some(pairing) = self.pairing {
            if self.norms.is_some() {
                features = features.into_iter().map(chain::stored).collect();
            }
            let (frequencies, scale) = (self.frequencies.values(), f64::from(self.scale));
            let rotate = |x: &[Real]| chain::rope(x, position, &frequencies, pairing, scale);
            features = features.chunks(head).flat_map(rotate).collect();
        }
        features
    }

    /// The expected results for the rows of a product.
    pub(super) fn expected(&self, products: &[Vec<Real>]) -> Vec<Expected> {
        let (columns, head, layout) = (self.columns(), self.sizes[2], self.layout);
        let shape = [self.caches[0].shape[0], self.sizes[1], self.block, head];
        let mut queries = Vec::new();
        let mut written = [(); 2].map(|()| vec![Element::Untouched; self.caches[0].bits.len()]);
        for (row, product) in products.iter().enumerate() {
            let product: Vec<Real> = product.iter().copied().map(chain::stored).collect();
            let (query, rest) = product.split_at(columns[0]);
            let (key, value) = rest.split_at(columns[1]);
            let position = self.positions[row];
            // With rotation, a row without a position is not written; without rotation, positions do not matter.
            let written_row = self.pairing.is_none() || position >= 0;
            let element = |real| if written_row { Element::Real(real) } else { Element::Untouched };
            queries.extend(self.rotated(query, 0, position).into_iter().map(element));
            let place = cache::place(self.slots[row], shape[0], self.block);
            let Some((page, place)) = place.filter(|_| row < layout.real_rows(self.rows)) else { continue };
            let key = self.rotated(key, 1, position).into_iter().map(chain::stored).collect::<Vec<_>>();
            for (elements, features) in written.iter_mut().zip([key.as_slice(), value]) {
                for (column, real) in features.iter().enumerate() {
                    let at = cache::element(shape, page, column / head, place, column % head);
                    elements[at] = Element::Real(*real);
                }
            }
        }
        let gate = Gate { exponential: self.pairing.is_some(), ..rounded(self.dtype) };
        let query_layout = Layout { offset: layout.offset + 1, ..layout };
        let mut results = vec![Expected::new(queries).gated(gate).laid(query_layout, columns[0])];
        results.extend(written.map(|elements| Expected::new(elements).gated(gate)));
        results
    }

    pub(super) fn operands(self) -> Vec<Option<Operand>> {
        let vectors = Layout { gap: 0, offset: 0, ..self.layout };
        let mut operands: Vec<_> = self.norms.into_iter().flatten().map(Operand::tensor).collect();
        if self.pairing.is_some() {
            operands.push(Operand::laid(Tensor::vector(&self.positions), vectors));
            operands.push(Operand::tensor(self.frequencies));
        }
        operands.extend(self.caches.map(|cache| Operand::laid(cache, Layout::strided(self.layout.gap, 0))));
        operands.push(Operand::laid(Tensor::vector(&self.slots), vectors));
        operands
    }
}
