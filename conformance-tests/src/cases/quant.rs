//! Cases of `quant_per_token`, of `linear_w8a8`, and of regions that contain them.

use super::{
    attention_input::{HeadsCase, HeadsOf, Variant, outputs},
    linear::{Shape, drawn_weight},
    norm::Head,
    plane::{Plane, ROWS, drawn, drawn_layout, planes, threshold_planes},
    region::{op, rounded},
    wanted::is_wanted,
};
use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand, Weight},
    draw::Draw,
    gate::Gate,
    oracle::{Real, activation, chain, quant},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType, WeightFormat,
    op::{Activation, Add, GateLayout, GatedActivation, LinearW8A8, Nonlinearity, QuantPerToken},
    region::well_known::{self, MlpActivation},
};

/// The layout of a vector with an element for each row of a plane.
fn vector_of(layout: Layout) -> Layout {
    Layout { gap: 0, ..layout }
}

pub(super) const KINDS: &[Values] =
    &[Values::Uniform, Values::HeavyTailed, Values::LargeMean, Values::Special];

pub(super) fn quant_per_token(dtype: DType) -> Vec<Case> {
    let mut planes = planes("quant_per_token", dtype, KINDS, |features| features);
    planes.extend(threshold_planes("quant_per_token", dtype, |features| features));
    planes.into_iter().map(|plane| quant_case(dtype, plane)).collect()
}

pub(super) fn drawn_quant_per_token(dtype: DType, draw: &mut Draw) -> Case {
    quant_case(dtype, drawn(draw, KINDS, |features| features))
}

fn quant_case(dtype: DType, plane: Plane) -> Case {
    let (mut random, columns) = (plane.random.clone(), plane.features);
    let mut x = random.tensor(dtype, &[plane.rows, columns], plane.values);
    for row in x.bits.chunks_mut(columns.max(1)) {
        // Some rows are zero.
        if random.chance(0.1) {
            row.fill(0);
        }
    }
    let (mut integers, mut scales) = (Vec::new(), Vec::new());
    for row in x.values().chunks(columns.max(1)) {
        if row.iter().all(|x| x.is_finite()) {
            let (scale, row) = quant::quantise(row);
            scales.push(Element::Bits((scale as f32).to_bits()));
            integers.extend(row.into_iter().map(|integer| Element::Bits(u32::from(integer as i8 as u8))));
        } else {
            scales.push(Element::Anything);
            integers.extend(vec![Element::Anything; columns]);
        }
    }
    let results = vec![
        Expected::new(integers).laid(plane.other(5), columns),
        Expected::new(scales).laid(vector_of(plane.other(0)), 1),
    ];
    Case::new(plane.id, CallCase::new(QuantPerToken {}, vec![Operand::laid(x, plane.layout)], results))
}

/// A linear layer with quantised activations and their scales.
struct Layer {
    x: Tensor,
    scales: Tensor,
    weight: Weight,
    bias: Option<Tensor>,
    /// The expected product, row by row.
    reals: Vec<Vec<Real>>,
}

const FORMATS: [&str; 3] = ["int8", "int8_f16", "int8_bf16"];

impl Layer {
    fn random(random: &mut Random, dtype: DType, [m, n, k]: [usize; 3], number: usize) -> Self {
        // Some rows have large terms that cancel, so that the remainder is lost if a sum is rounded to f32.
        let byte = |random: &mut Random, index: usize| match number % 3 {
            0 => random.bits() as u8 as i8,
            1 => random.pick(&[127, -127, 126, -128]),
            _ if index % k.max(1) < k / 2 => 127,
            _ => -127 + i8::from(random.chance(0.1)),
        };
        let x: Vec<i8> = (0..m * k).map(|index| byte(random, index)).collect();
        let scale = |random: &mut Random| if random.chance(0.1) { 0.0 } else { random.between(0.001, 0.1) };
        let scales: Vec<f64> = (0..m).map(|_| scale(random)).collect();
        let scales = Tensor::floats(DType::F32, &[m], &scales);
        let format = WeightFormat::from_name(FORMATS[number % 3]).unwrap_or(WeightFormat::Dense(DType::F32));
        let mut weight = drawn_weight(random, format, [n, k], 1.0 / (k.max(1) as f64).sqrt());
        let row_bytes = weight.bytes.len() / n.max(1);
        if number % 3 == 2 {
            weight.bytes.chunks_mut(row_bytes.max(1)).for_each(|row| row[16..16 + k].fill(127));
        }
        let bias = (number % 2 == 1).then(|| random.tensor(dtype, &[n], Values::Uniform));
        let biases = bias.as_ref().map(Tensor::values);
        let rows: Vec<(f64, Vec<i32>)> =
            weight.bytes.chunks(row_bytes.max(1)).map(|row| signed(row, format, k)).collect();
        let of_row = |(x, x_scale): (&[i32], f64)| {
            let dot = |(index, (scale, q)): (usize, &(f64, Vec<i32>))| {
                quant::dot(x, x_scale, q, *scale, biases.as_ref().map_or(0.0, |bias| bias[index]))
            };
            rows.iter().enumerate().map(dot).collect()
        };
        let wide: Vec<i32> = x.iter().map(|byte| i32::from(*byte)).collect();
        let reals = (0..m).map(|row| of_row((&wide[row * k..][..k], scales.values()[row]))).collect();
        let bits = x.iter().map(|byte| u32::from(*byte as u8)).collect();
        Self { x: Tensor { dtype: DType::I8, shape: vec![m, k], bits }, scales, weight, bias, reals }
    }

    fn operands(self, layout: Layout) -> Vec<Option<Operand>> {
        let x = Operand::laid(self.x, layout);
        let scales = Operand::laid(self.scales, vector_of(layout));
        vec![x, scales, Operand::weight(self.weight), self.bias.and_then(Operand::tensor)]
    }

    /// The operands for a region, without those that are absent.
    fn present(self, layout: Layout) -> Vec<Option<Operand>> {
        self.operands(layout).into_iter().filter(Option::is_some).collect()
    }
}

/// The scale and the integers of a quantised row.
fn signed(row: &[u8], format: WeightFormat, columns: usize) -> (f64, Vec<i32>) {
    let scale = match (format.to_string().as_str(), row) {
        ("int8_f16", [a, b, ..]) => half::f16::from_le_bytes([*a, *b]).to_f64(),
        ("int8_bf16", [a, b, ..]) => half::bf16::from_le_bytes([*a, *b]).to_f64(),
        (_, [a, b, c, d, ..]) => f64::from(f32::from_le_bytes([*a, *b, *c, *d])),
        _ => 0.0,
    };
    (scale, row.iter().skip(16).take(columns).map(|byte| i32::from(*byte as i8)).collect())
}

const fn layout(gap: usize, bounded: bool, extent: Option<usize>) -> Layout {
    Layout { gap, offset: 0, bounded, extent }
}

const PLAIN: Layout = layout(0, false, None);

/// Label, rows, outputs, inputs and layout of each case.
const SHAPES: &[Shape] = &[
    ("no_rows", 0, 8, 32, PLAIN),
    ("one_element", 1, 1, 1, PLAIN),
    ("one_row", 1, 65, 160, PLAIN),
    ("two_rows", 2, 31, 64, PLAIN),
    ("odd", 7, 31, 33, PLAIN),
    ("prime", 13, 61, 127, PLAIN),
    ("below_a_tile", 15, 63, 128, PLAIN),
    ("a_tile", 16, 64, 192, PLAIN),
    ("above_a_tile", 17, 129, 160, PLAIN),
    ("many_rows", 130, 130, 64, PLAIN),
    ("long_sum", 3, 5, 14_336, PLAIN),
    ("long_sum_of_one", 1, 8, 11_008, PLAIN),
    ("longest_sum", 2, 2, LinearW8A8::MAX_INPUTS, PLAIN),
    ("strided", 5, 24, 64, layout(16, false, None)),
    ("strided_oddly", 5, 23, 64, layout(3, false, None)),
    ("bounded_full", 6, 24, 64, layout(0, true, None)),
    ("extent", 9, 24, 64, layout(8, true, Some(7))),
    ("extent_of_one", 33, 40, 32, layout(0, true, Some(1))),
    ("extent_of_nothing", 6, 24, 64, layout(0, true, Some(0))),
    ("whole_tiles_of_few_rows", 40, 208, 320, PLAIN),
    ("whole_tiles_of_many_rows", 150, 144, 320, layout(0, true, Some(140))),
];

/// Label, rows, outputs, inputs and layout of regions with a product whose rows and outputs are multiples of 8 or 16, as kernels
/// with large tiles require.
const TILED: &[Shape] = &[
    ("tiles_of_few_rows", 20, 80, 160, PLAIN),
    ("tiles_of_some_rows", 100, 48, 288, layout(16, true, Some(90))),
    ("tiles_of_many_rows", 140, 72, 160, layout(0, true, Some(135))),
    ("two_tiles_of_many_rows", 150, 136, 320, PLAIN),
];

/// The planes of [`TILED`], with the number of outputs of each.
fn tiled(op: &str, dtype: DType) -> impl Iterator<Item = (Plane, usize)> {
    TILED.iter().enumerate().map(move |(index, (label, rows, results, features, layout))| {
        let id = format!("{op}/{dtype}/{label}");
        let (random, number) = (Random::named(&id), 3 * index + 1);
        let (rows, features, values) = (*rows, *features, Values::Uniform);
        (Plane { id, rows, features, layout: *layout, values, random, number }, *results)
    })
}

pub(super) fn linear_w8a8(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (label, m, n, k, layout)) in SHAPES.iter().copied().enumerate() {
        for kind in 0..2 {
            let suffix = ["", "_more"][kind];
            let id = format!("linear_w8a8/{dtype}/{label}{suffix}");
            let random = Random::named(&id);
            // Together with the bias, which alternates, steps of 2 reach all combinations.
            cases.push(linear_case(dtype, id, random, [m, n, k], layout, 2 * index + kind + index / 3));
        }
    }
    cases
}

pub(super) fn drawn_linear_w8a8(dtype: DType, draw: &mut Draw) -> Case {
    let n = draw.pick(&[1, 2, 7, 8, 31, 32, 61, 63, 64, 65, 127, 128, 129]);
    let k = draw.pick(&[32, 1, 2, 3, 7, 61, 64, 127, 128, 129, 160, 256, 1024, 4099]);
    let m = draw.pick(ROWS).min(((1 << 19) / (n * k)).max(1));
    let layout = Layout { offset: 0, ..drawn_layout(draw, m) };
    let number = draw.below(6);
    linear_case(dtype, draw.id(), draw.values(), [m, n, k], layout, number)
}

fn linear_case(
    dtype: DType,
    id: String,
    mut random: Random,
    sizes: [usize; 3],
    layout: Layout,
    number: usize,
) -> Case {
    let layer = Layer::random(&mut random, dtype, sizes, number);
    let expected = Expected::reals(layer.reals.concat()).laid(Layout { offset: 1, ..layout }, sizes[1]);
    Case::new(id, CallCase::new(LinearW8A8 { dtype }, layer.operands(layout), vec![expected]))
}

/// The expected `y` and `scales` of rows that a region quantises without rounding them first.
fn quantised(rows: &[Vec<Real>], gate: Gate, layout: Layout, gap: usize) -> Vec<Expected> {
    let columns = rows.first().map_or(1, Vec::len);
    let (mut integers, mut scales) = (Vec::new(), Vec::new());
    for row in rows {
        let (scale, choices) = quant::quantise_reals(row, gate);
        scales.push(scale);
        let bits =
            |choice: Vec<i32>| choice.into_iter().map(|integer| u32::from(integer as i8 as u8)).collect();
        integers.extend(choices.into_iter().map(|choice| Element::OneOf(bits(choice))));
    }
    let laid = Layout { gap: if layout.gap > 0 { gap } else { 0 }, offset: layout.offset + 1, ..layout };
    vec![
        Expected::new(integers).laid(laid, columns),
        Expected::reals(scales).gated(gate).laid(vector_of(laid), 1),
    ]
}

pub(super) fn norm_quant(dtype: DType) -> Vec<Case> {
    let planes = planes("norm_quant", dtype, &Values::USUAL, |features| features);
    planes.into_iter().map(|plane| norm_quant_case(dtype, plane)).collect()
}

pub(super) fn drawn_norm_quant(dtype: DType, draw: &mut Draw) -> Case {
    norm_quant_case(dtype, drawn(draw, &Values::USUAL, |features| features))
}

fn norm_quant_case(dtype: DType, plane: Plane) -> Case {
    let (mut random, columns) = (plane.random.clone(), plane.features);
    let x = random.tensor(dtype, &[plane.rows, columns], plane.values);
    let head = Head::random(&mut random, dtype, columns, plane.number % 2 == 1);
    let rows: Vec<Vec<Real>> = x.values().chunks(columns).map(|row| head.of(row)).collect();
    let results = quantised(&rows, rounded(dtype), plane.layout, 5);
    let op = op(well_known::norm_quant(head.norm));
    let operands = [Operand::laid(x, plane.layout)].into_iter().chain(head.operands()).collect();
    Case::new(plane.id, CallCase::new(op, operands, results))
}

const GATES: [GateLayout; 3] = [GateLayout::Separate, GateLayout::Concatenated, GateLayout::Interleaved];

pub(super) fn gated_activation_quant(dtype: DType) -> Vec<Case> {
    let of = |gate: GateLayout| {
        let name = format!("gated_activation_quant_{}", gate.name());
        let planes = planes(&name, dtype, &Values::USUAL, |features| features);
        planes.into_iter().map(move |plane| activation_quant_case(dtype, Some(gate), plane))
    };
    GATES.into_iter().flat_map(of).collect()
}

pub(super) fn drawn_gated_activation_quant(dtype: DType, draw: &mut Draw) -> Case {
    let gate = draw.pick(&GATES);
    activation_quant_case(dtype, Some(gate), drawn(draw, &Values::USUAL, |features| features))
}

pub(super) fn activation_quant(dtype: DType) -> Vec<Case> {
    let planes = planes("activation_quant", dtype, &Values::USUAL, |features| features);
    planes.into_iter().map(|plane| activation_quant_case(dtype, None, plane)).collect()
}

pub(super) fn drawn_activation_quant(dtype: DType, draw: &mut Draw) -> Case {
    activation_quant_case(dtype, None, drawn(draw, &Values::USUAL, |features| features))
}

fn activation_quant_case(dtype: DType, gate: Option<GateLayout>, plane: Plane) -> Case {
    let (mut random, n, number) = (plane.random.clone(), plane.features, plane.number);
    let function = Nonlinearity::ALL[number % 4];
    let limit = random.pick(&[0.0f32, 0.0, 7.0]);
    let packed = gate.is_some_and(|gate| gate != GateLayout::Separate);
    let width = if packed { 2 * n } else { n };
    let x = random.tensor(dtype, &[plane.rows, width], plane.values);
    let up =
        (gate == Some(GateLayout::Separate)).then(|| random.tensor(dtype, &[plane.rows, n], plane.values));
    let (values, ups) = (x.values(), up.as_ref().map(Tensor::values));
    let limits = f64::from(limit);
    let element = |row: usize, column: usize| {
        let x = &values[row * width..][..width];
        let real = match gate {
            None => activation::activation(function, limits, x[column], 0.0),
            Some(gate) => {
                let (first, second) = match (gate, &ups) {
                    (GateLayout::Interleaved, _) => (x[2 * column], x[2 * column + 1]),
                    (_, Some(ups)) => (x[column], ups[row * n + column]),
                    (_, None) => (x[column], x[n + column]),
                };
                activation::gated(function, limits, 0.0, [first, 0.0], [second, 0.0])
            }
        };
        chain::stored(real)
    };
    let rows: Vec<Vec<Real>> =
        (0..plane.rows).map(|row| (0..n).map(|column| element(row, column)).collect()).collect();
    let tolerance = Gate { exponential: function != Nonlinearity::Relu, ..rounded(dtype) };
    let results = quantised(&rows, tolerance, plane.layout, 5);
    let activation: MlpActivation = match gate {
        None => Activation { function, limit }.into(),
        Some(layout) => GatedActivation { function, layout, limit, up_offset: 0.0 }.into(),
    };
    let operands = [Operand::laid(x, plane.layout)].into_iter();
    let operands = operands.chain(up.map(|up| Operand::laid(up, plane.other(3)))).collect();
    Case::new(plane.id, CallCase::new(op(well_known::activation_quant(activation)), operands, results))
}

pub(super) fn linear_w8a8_add(dtype: DType) -> Vec<Case> {
    let planes = planes("linear_w8a8_add", dtype, &[Values::Uniform], |features| features);
    let cases = planes.into_iter().map(|plane| add_case(dtype, plane, None));
    let tiled = tiled("linear_w8a8_add", dtype);
    cases.chain(tiled.map(|(plane, outputs)| add_case(dtype, plane, Some(outputs)))).collect()
}

pub(super) fn drawn_linear_w8a8_add(dtype: DType, draw: &mut Draw) -> Case {
    add_case(dtype, drawn(draw, &[Values::Uniform], |features| features), None)
}

fn add_case(dtype: DType, plane: Plane, outputs: Option<usize>) -> Case {
    let mut random = plane.random.clone();
    let n = outputs.unwrap_or_else(|| 1 + random.below(40));
    let layer = Layer::random(&mut random, dtype, [plane.rows, n, plane.features], plane.number);
    let residual = random.tensor(dtype, &[plane.rows, n], Values::HeavyTailed);
    let alpha = random.pick(&[1.0f32, 1.0, -0.5]);
    let sums = layer.reals.concat().into_iter().zip(residual.values());
    let reals: Vec<Real> = sums.map(|(y, a)| chain::add(a, chain::stored(y), f64::from(alpha))).collect();
    let expected = Expected::reals(reals).gated(rounded(dtype)).laid(plane.other(3), n);
    let op = op(well_known::linear_w8a8_add(dtype, layer.bias.is_some(), Add { alpha }));
    let mut operands = layer.present(plane.layout);
    operands.push(Operand::laid(residual, plane.other(5)));
    Case::new(plane.id, CallCase::new(op, operands, vec![expected]))
}

/// Label, rows and inputs, heads as in `attention_input`, and layout of each case. The last five have the rows of a decode batch:
/// the first with a cache type wider than the results, the second with unaligned rows, and three, from few outputs to many, whose
/// heads a device may finish in the epilogue of the product.
const HEADS: &[(&str, HeadsOf)] = &[
    ("no_rows", ([0, 64], [2, 1, 16, 8], PLAIN)),
    ("one_row", ([1, 96], [3, 1, 64, 32], PLAIN)),
    ("seven_rows", ([7, 64], [4, 4, 16, 8], layout(0, true, Some(5)))),
    ("head_80", ([19, 64], [2, 2, 80, 40], PLAIN)),
    ("head_96_partly", ([4, 96], [2, 1, 96, 16], layout(16, false, None))),
    ("many_rows", ([140, 64], [4, 2, 64, 32], layout(0, true, Some(139)))),
    ("sequences", ([29, 160], [8, 2, 128, 64], layout(0, true, Some(26)))),
    ("sequences_of_small_heads", ([17, 72], [9, 3, 64, 32], layout(16, false, None))),
    ("sequences_half_the_device", ([70, 320], [32, 4, 64, 32], layout(0, true, Some(65)))),
    ("sequences_a_tile_each", ([48, 32], [36, 3, 128, 64], layout(16, true, Some(47)))),
    ("sequences_two_tiles_each", ([128, 64], [60, 4, 128, 64], PLAIN)),
];

pub(super) fn linear_w8a8_heads(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (label, heads)) in HEADS.iter().copied().enumerate() {
        // Variants with and without rotation and per-head norms; steps of 3 keep the first kind.
        for (suffix, variant) in [("", 6 * (index % 2)), ("_more", 3 * (index % 2) + 7 * index + 2)] {
            let id = format!("linear_w8a8_heads/{dtype}/{label}{suffix}");
            if !is_wanted(&id) {
                continue;
            }
            let random = Random::named(&id);
            cases.push(heads_case(id, dtype, heads, Variant::number(variant), random, 4 * index));
        }
    }
    cases
}

pub(super) fn drawn_linear_w8a8_heads(dtype: DType, draw: &mut Draw) -> Case {
    let head = draw.pick(&[16, 2, 6, 64, 80, 96, 128]);
    let (kv_heads, groups, pairs) = (1 + draw.below(3), 1 + draw.below(4), head / 2 - draw.below(2));
    let (rows, inputs) = (draw.pick(ROWS).min(40), draw.pick(&[32, 33, 64, 72, 128]));
    let layout = Layout { offset: 0, ..drawn_layout(draw, rows) };
    let heads = ([rows, inputs], [kv_heads * groups, kv_heads, head, pairs], layout);
    let (variant, number) = (Variant::number(draw.below(Variant::COUNT)), draw.below(60));
    heads_case(draw.id(), dtype, heads, variant, draw.values(), number)
}

fn heads_case(
    id: String,
    dtype: DType,
    ([rows, inputs], sizes, layout): HeadsOf,
    variant: Variant,
    mut random: Random,
    number: usize,
) -> Case {
    let layer = Layer::random(&mut random, dtype, [rows, outputs(sizes), inputs], number);
    let heads = HeadsCase::random(&mut random, dtype, (rows, sizes, layout), variant, number);
    let results = heads.expected(&layer.reals);
    let op = op(well_known::linear_w8a8_heads(dtype, layer.bias.is_some(), heads.attributes()));
    let mut operands = layer.present(layout);
    operands.extend(heads.operands());
    Case::new(id, CallCase::new(op, operands, results))
}

pub(super) fn linear_w8a8_activation(dtype: DType) -> Vec<Case> {
    let planes = planes("linear_w8a8_activation", dtype, &[Values::Uniform], |features| features);
    let cases = planes.into_iter().map(|plane| product_activation_case(dtype, plane, None));
    let tiled = tiled("linear_w8a8_activation", dtype);
    cases.chain(tiled.map(|(plane, results)| product_activation_case(dtype, plane, Some(results)))).collect()
}

pub(super) fn drawn_linear_w8a8_activation(dtype: DType, draw: &mut Draw) -> Case {
    product_activation_case(dtype, drawn(draw, &[Values::Uniform], |features| features), None)
}

fn product_activation_case(dtype: DType, plane: Plane, results: Option<usize>) -> Case {
    let (mut random, number) = (plane.random.clone(), plane.number);
    let n = results.unwrap_or_else(|| 1 + random.below(20));
    let gate = [None, Some(GateLayout::Concatenated), Some(GateLayout::Interleaved)][number % 3];
    let outputs = if gate.is_some() { 2 * n } else { n };
    let layer = Layer::random(&mut random, dtype, [plane.rows, outputs, plane.features], number / 2);
    let (function, limit) = (Nonlinearity::ALL[number / 3 % 4], random.pick(&[0.0f32, 7.0]));
    let limits = f64::from(limit);
    let activate = |product: &[Real], column: usize| match gate {
        None => chain::activation(function, limits, product[column]),
        Some(GateLayout::Interleaved) => {
            chain::gated(function, limits, product[2 * column], product[2 * column + 1])
        }
        Some(_) => chain::gated(function, limits, product[column], product[n + column]),
    };
    let mut reals = Vec::new();
    for row in &layer.reals {
        let product: Vec<Real> = row.iter().copied().map(chain::stored).collect();
        reals.extend((0..n).map(|column| activate(&product, column)));
    }
    let tolerance = Gate { exponential: function != Nonlinearity::Relu, ..rounded(dtype) };
    let expected = Expected::reals(reals).gated(tolerance).laid(plane.other(3), n);
    let bias = layer.bias.is_some();
    let region = match gate {
        None => well_known::linear_w8a8_activation(dtype, bias, Activation { function, limit }),
        Some(layout) => well_known::linear_w8a8_activation(
            dtype,
            bias,
            GatedActivation { function, layout, limit, up_offset: 0.0 },
        ),
    };
    let operands = layer.present(plane.layout);
    Case::new(plane.id, CallCase::new(op(region), operands, vec![expected]))
}
