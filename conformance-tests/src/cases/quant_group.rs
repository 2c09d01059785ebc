//! Cases of `quant_per_group` and `linear_a8`.

use super::{
    linear::{INPUTS, MULTIPLICATIONS, OUTPUTS, drawn_weight, formats, goes_with, scale_bytes},
    plane::{Plane, ROWS, drawn, drawn_layout, planes, threshold_planes},
    quant::KINDS,
    wanted::is_wanted,
};
use crate::{
    case::{CallCase, Case, Element, Expected, Layout, Operand, Weight},
    draw::Draw,
    oracle::{Real, quant, weight},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{
    DType, GroupFormat, WeightFormat, WeightType,
    op::{LinearA8, QuantPerGroup},
};

/// Names and sizes of groups; 0 stands for the whole row.
const GROUPS: [(&str, usize); 4] = [("1", 1), ("16", 16), ("32", 32), ("row", 0)];

/// The smallest number of columns that is at least `columns` and can be divided into groups.
fn whole_groups(columns: usize, size: usize) -> usize {
    columns.next_multiple_of(size.max(1))
}

/// The number of elements of a group in a row of `columns`.
fn group_of(size: usize, columns: usize) -> usize {
    if size == 0 { columns.max(1) } else { size }
}

pub(super) fn quant_per_group(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, size) in GROUPS {
        let op = format!("quant_per_group_{name}");
        let mut planes = planes(&op, dtype, KINDS, |features| whole_groups(features, size));
        planes.extend(threshold_planes(&op, dtype, |features| whole_groups(features, size)));
        // A group of 32 makes a threshold of rows 32 times as large, which would take too long.
        let is_small = |plane: &Plane| size <= 1 || plane.rows * plane.features <= 1 << 19;
        cases.extend(planes.into_iter().filter(is_small).map(|plane| quant_case(dtype, plane, size)));
    }
    cases
}

pub(super) fn drawn_quant_per_group(dtype: DType, draw: &mut Draw) -> Case {
    let size = draw.pick(&[32, 1, 2, 7, 16, 64, 0]);
    quant_case(dtype, drawn(draw, KINDS, |features| whole_groups(features, size)), size)
}

fn quant_case(dtype: DType, plane: Plane, size: usize) -> Case {
    let (mut random, columns) = (plane.random.clone(), plane.features);
    let group = group_of(size, columns);
    let mut x = random.tensor(dtype, &[plane.rows, columns], plane.values);
    for group in x.bits.chunks_mut(group) {
        // Some groups are zero.
        if random.chance(0.1) {
            group.fill(0);
        }
    }
    let (mut integers, mut scales) = (Vec::new(), Vec::new());
    for group in x.values().chunks(group) {
        if group.iter().all(|x| x.is_finite()) {
            let (scale, group) = quant::quantise(group);
            scales.push(Element::Bits((scale as f32).to_bits()));
            integers.extend(group.into_iter().map(|integer| Element::Bits(u32::from(integer as i8 as u8))));
        } else {
            scales.push(Element::Anything);
            integers.extend(vec![Element::Anything; group.len()]);
        }
    }
    let results = vec![
        Expected::new(integers).laid(plane.other(5), columns),
        Expected::new(scales).laid(plane.other(3), columns / group),
    ];
    let op = QuantPerGroup { group: group as u32 };
    Case::new(plane.id, CallCase::new(op, vec![Operand::laid(x, plane.layout)], results))
}

/// What integers of activations and weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Integers {
    /// Any.
    Random,
    /// Activations at both ends of the range.
    Ends,
    /// Both at the ends of the range, with one sign: sums grow as far as they can. In every fourth row the signs of activations
    /// alternate, so that terms cancel.
    Extreme,
    /// Both near the positive end: long sums exceed 31 bits.
    Large,
}

/// Label, rows, outputs, inputs, size of a group and layout of each case.
type Shape = (&'static str, usize, usize, usize, usize, Layout);

const fn layout(gap: usize, bounded: bool, extent: Option<usize>) -> Layout {
    Layout { gap, offset: 0, bounded, extent }
}

const PLAIN: Layout = layout(0, false, None);

/// Shapes for every format. Inputs are rounded up to whole blocks and groups.
const SHAPES: &[Shape] = &[
    ("no_rows", 0, 8, 32, 32, PLAIN),
    ("one_group", 1, 1, 32, 32, PLAIN),
    ("one_row", 1, 65, 160, 32, PLAIN),
    ("one_row_of_small_groups", 1, 33, 96, 16, PLAIN),
    ("two_rows", 2, 31, 64, 16, PLAIN),
    ("seven_rows", 7, 32, 192, 64, PLAIN),
    ("below_a_tile", 15, 63, 128, 32, PLAIN),
    ("above_a_tile", 17, 129, 160, 0, PLAIN),
    ("many_rows", 67, 33, 64, 32, PLAIN),
    ("rows_129", 129, 17, 128, 32, PLAIN),
    ("rows_150_of_64", 150, 16, 64, 64, PLAIN),
    ("long_sum", 3, 5, 14_336, 32, PLAIN),
    ("long_group", 2, 3, 4096, 0, PLAIN),
    ("group_of_one", 4, 9, 64, 1, PLAIN),
    ("group_of_8", 5, 19, 96, 8, PLAIN),
    ("group_of_48", 6, 20, 96, 48, PLAIN),
    ("group_of_128", 3, 24, 256, 128, PLAIN),
    ("strided", 5, 24, 64, 32, layout(16, false, None)),
    ("strided_oddly", 5, 23, 64, 16, layout(3, false, None)),
    ("bounded_full", 6, 24, 64, 32, layout(0, true, None)),
    ("extent", 9, 24, 64, 32, layout(8, true, Some(7))),
    ("extent_of_one", 33, 40, 32, 16, layout(0, true, Some(1))),
    ("extent_of_nothing", 6, 24, 64, 64, layout(0, true, Some(0))),
    ("batch_extent", 150, 48, 128, 32, layout(8, true, Some(133))),
];

/// Shapes for formats without blocks, which may have any number of columns, or any even number.
const ODD_SHAPES: &[Shape] = &[
    ("one_element", 1, 1, 1, 1, PLAIN),
    ("odd", 7, 31, 33, 11, PLAIN),
    ("prime", 13, 61, 127, 0, layout(1, false, None)),
];

/// Shapes with the largest sums.
const EXTREME_SHAPES: &[Shape] = &[
    ("extremes", 9, 20, 512, 32, PLAIN),
    ("extremes_of_16", 5, 12, 256, 16, PLAIN),
    ("extremes_of_rows", 130, 8, 512, 0, PLAIN),
    ("extremes_of_one_row", 1, 16, 1024, 64, PLAIN),
];

/// As many inputs as make a sum of [`Integers::Large`] exceed 31 bits.
const LARGE_SHAPE: Shape = ("sum_above_31_bits", 2, 2, 144_000, 0, PLAIN);

/// A product of quantised activations and a weight.
struct Product {
    id: String,
    format: WeightFormat,
    /// The numbers of rows, outputs and inputs.
    sizes: [usize; 3],
    /// The number of elements that share a scale.
    group: usize,
    layout: Layout,
    integers: Integers,
    /// The distribution of scales; `None` for the usual scales, some of which are zero.
    scales: Option<Values>,
    bias: Option<Values>,
    /// The element type of the result.
    to: DType,
    random: Random,
}

impl Product {
    /// The product of a shape. `number` determines the element type of the result, and whether there is a bias.
    fn of(dtype: DType, format: WeightFormat, shape: Shape, integers: Integers, number: usize) -> Self {
        let (label, rows, outputs, inputs, size, layout) = shape;
        let id = format!("linear_a8_{format}/{dtype}/{label}");
        let inputs = inputs_of(format, inputs, size);
        Self {
            random: Random::named(&id),
            id,
            format,
            sizes: [rows, outputs, inputs],
            group: group_of(size, inputs),
            layout,
            integers,
            scales: None,
            bias: (number % 2 == 1).then_some(Values::HeavyTailed),
            to: if number % 4 == 3 { DType::F32 } else { dtype },
        }
    }
}

/// The smallest number of inputs that is at least `inputs`, and whole groups of activations and whole blocks of the weight.
fn inputs_of(format: WeightFormat, inputs: usize, size: usize) -> usize {
    let unit = format.granularity();
    let columns = (inputs.div_ceil(unit)..).map(|units| units * unit);
    columns.take(size + 1).find(|columns| columns.is_multiple_of(size.max(1))).unwrap_or(inputs)
}

pub(super) fn linear_a8(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for format in formats().into_iter().filter(|format| goes_with(*format, dtype)) {
        let odd = if format.granularity() <= 2 { ODD_SHAPES } else { &[] };
        let shapes = SHAPES.iter().chain(odd).enumerate().map(|(number, shape)| {
            let integers = if number % 3 == 1 { Integers::Ends } else { Integers::Random };
            Product::of(dtype, format, *shape, integers, number)
        });
        let extremes = EXTREME_SHAPES.iter().enumerate();
        let extremes =
            extremes.map(|(number, shape)| Product::of(dtype, format, *shape, Integers::Extreme, number));
        let wanted = shapes.chain(extremes).filter(|product| is_wanted(&product.id));
        cases.extend(wanted.map(|product| product.case(dtype)));
        if format == WeightFormat::Group(GroupFormat::INT8) {
            cases.push(Product::of(dtype, format, LARGE_SHAPE, Integers::Large, 0).case(dtype));
        }
        let is_special = [WeightFormat::from_name("q4_1"), WeightFormat::from_name("int8")];
        if format == WeightFormat::Dense(dtype) || is_special.contains(&Some(format)) {
            cases.extend(special_cases(dtype, format));
        }
    }
    cases
}

/// Scales and biases that are infinite or NaN, zeros of both signs, or subnormal numbers.
fn special_cases(dtype: DType, format: WeightFormat) -> Vec<Case> {
    let of = |label, values: Values, bias| {
        let shape = (label, 29, 17, 96, 32, layout(3, false, None));
        let product = Product::of(dtype, format, shape, Integers::Random, 0);
        Product { scales: Some(values), bias, ..product }.case(dtype)
    };
    let mut cases = vec![
        of("special_rare", Values::Special, Some(Values::Special)),
        of("special_zeros", Values::Zeros, Some(Values::Uniform)),
    ];
    // Products of large weights and subnormal scales are normal numbers; f16 has no such weights.
    if format == WeightFormat::Dense(dtype) && dtype != DType::F16 {
        cases.push(of("special_subnormals", Values::Subnormal, None));
    }
    cases
}

pub(super) fn drawn_linear_a8(dtype: DType, draw: &mut Draw) -> Case {
    let there: Vec<WeightFormat> = [WeightFormat::Dense(dtype)]
        .into_iter()
        .chain(formats())
        .chain(GroupFormat::all().map(WeightFormat::Group))
        .filter(|format| goes_with(*format, dtype))
        .collect();
    let format = draw.pick(&there);
    let size = draw.pick(&[32, 16, 64, 128, 256, 1, 8, 24, 0]);
    let (n, k) = (draw.pick(OUTPUTS), draw.pick(INPUTS));
    let k = inputs_of(format, k, size);
    let m = draw.pick(ROWS).min((MULTIPLICATIONS / (n * k)).max(1));
    let product = Product {
        id: draw.id(),
        format,
        sizes: [m, n, k],
        group: group_of(size, k),
        layout: Layout { offset: 0, ..drawn_layout(draw, m) },
        integers: draw.pick(&[Integers::Random, Integers::Ends, Integers::Extreme]),
        scales: None,
        bias: draw.sometimes().then_some(Values::HeavyTailed),
        to: draw.pick(&[dtype, DType::F32]),
        random: draw.values(),
    };
    product.case(dtype)
}

impl Product {
    /// The quantised activations. The byte -128 is not among them.
    fn activations(&mut self) -> Vec<i32> {
        let [rows, _, inputs] = self.sizes;
        let (random, integers) = (&mut self.random, self.integers);
        let mut activation = |row: usize, input: usize| match (integers, row % 4) {
            (Integers::Random, _) => random.below(255) as i32 - 127,
            (Integers::Ends, _) => random.pick(&[127, -127, 126, -126, 0]),
            (Integers::Extreme, 0) => 127,
            (Integers::Extreme, 1) => -127,
            (Integers::Extreme, 2) => 127 - random.below(8) as i32,
            (Integers::Extreme, _) if input.is_multiple_of(2) => 127,
            (Integers::Extreme, _) => -127 + i32::from(random.chance(0.1)),
            (Integers::Large, _) => 127 - random.below(4) as i32,
        };
        (0..rows)
            .flat_map(|row| (0..inputs).map(move |input| (row, input)))
            .map(|(row, input)| activation(row, input))
            .collect()
    }

    fn scales(&mut self) -> Tensor {
        let shape = [self.sizes[0], self.sizes[2] / self.group];
        if let Some(values) = self.scales {
            return self.random.tensor(DType::F32, &shape, values);
        }
        let (random, integers) = (&mut self.random, self.integers);
        let mut scale = || match integers {
            // Powers of two, so that most sums of the largest integers are exact in f32.
            Integers::Extreme => random.pick(&[1.0 / 64.0, 1.0 / 128.0]),
            _ if random.chance(0.1) => 0.0,
            _ => random.between(0.001, 0.1),
        };
        let all: Vec<f64> = (0..shape[0] * shape[1]).map(|_| scale()).collect();
        Tensor::floats(DType::F32, &shape, &all)
    }

    fn weight(&mut self) -> Weight {
        let [_, outputs, inputs] = self.sizes;
        // Weights that bring products of subnormal scales back into the range of normal numbers.
        let size = match self.scales {
            Some(Values::Subnormal) => 2f64.powi(100),
            _ => 1.0 / (inputs as f64).sqrt(),
        };
        let mut weight = drawn_weight(&mut self.random, self.format, [outputs, inputs], size);
        match self.integers {
            Integers::Random | Integers::Ends => {}
            Integers::Extreme => extreme(&mut weight),
            Integers::Large => {
                let random = &mut self.random;
                with_integers(&mut weight, |_| 127 - random.below(4) as u8);
            }
        }
        weight
    }

    fn case(mut self, dtype: DType) -> Case {
        let [rows, outputs, inputs] = self.sizes;
        let (integers, scales, weight) = (self.activations(), self.scales(), self.weight());
        let bias = self.bias.map(|values| self.random.tensor(dtype, &[outputs], values));
        let biases = bias.as_ref().map_or_else(|| vec![0.0; outputs], Tensor::values);
        let elements = weight::reals_in_parts(&weight.weight_type, &weight.bytes);
        let groups = inputs / self.group;
        let of_scales = scales.values();
        let element = |row: usize, output: usize| {
            let scales = &of_scales[row * groups..][..groups];
            let x = &integers[row * inputs..][..inputs];
            let weight = &elements[output * inputs..][..inputs];
            let infinite = scales.iter().any(|scale| scale.is_infinite());
            if infinite && !scales.iter().any(|scale| scale.is_nan()) {
                // An infinite scale times a sum has a sign, where a sum of infinite products has none.
                return Element::Anything;
            }
            // The gate allows 8 roundings of f32 in proportion to the magnitude. A term has at most three, of the scaled
            // activation, the decoded weight and their product, and there is one of the minimum if it is summed apart. Exact
            // sums within a group have fewer. The rest is for the sum, as in `linear`. Weights and activations are not rounded to
            // storage types, so nothing else is allowed.
            let real = quant::dot_of_groups(x, scales, weight, biases[output]);
            // In a running sum of equal terms f32 rounds in the same direction at every step, up to once for each of n terms. The gate
            // allows for 2 √n roundings of terms that differ, so n² terms make it allow for 2 n.
            let terms = match self.integers {
                Integers::Random | Integers::Ends => real.terms,
                Integers::Extreme | Integers::Large => real.terms * real.terms,
            };
            Element::Real(Real { terms, ..real })
        };
        let expected = (0..rows).flat_map(|row| (0..outputs).map(move |output| (row, output)));
        let expected = Expected::new(expected.map(|(row, output)| element(row, output)).collect());
        let bits = integers.iter().map(|integer| u32::from(*integer as i8 as u8)).collect();
        let x = Tensor { dtype: DType::I8, shape: vec![rows, inputs], bits };
        let layout = self.layout;
        let layout_of_scales = Layout { gap: if layout.gap > 0 { 3 } else { 0 }, offset: 2, ..layout };
        let operands = vec![
            Operand::laid(x, layout),
            Operand::laid(scales, layout_of_scales),
            Operand::weight(weight),
            bias.and_then(Operand::tensor),
        ];
        let op = LinearA8 { dtype: self.to, group: self.group as u32 };
        let expected = expected.laid(Layout { offset: 1, ..layout }, outputs);
        Case::new(self.id, CallCase::new(op, operands, vec![expected]))
    }
}

/// Gives every row of a weight the elements at an end of the range that its format has: the bytes of all its integers are one of
/// `0xFF`, `0x00`, `0x7F` and `0x80`, and the elements of a dense weight one of four numbers.
fn extreme(weight: &mut Weight) {
    const BYTES: [u8; 4] = [0xFF, 0x00, 0x7F, 0x80];
    const DENSE: [f64; 4] = [1.0, -1.0, 127.0 / 128.0, -0.5];
    match weight.weight_type.format {
        WeightFormat::Dense(dtype) => {
            let (rows, columns) = (weight.weight_type.rows(), weight.weight_type.columns());
            let all: Vec<f64> = (0..rows * columns).map(|index| DENSE[index / columns % 4]).collect();
            weight.bytes = Tensor::floats(dtype, &[rows, columns], &all).bytes();
        }
        _ => with_integers(weight, |row| BYTES[row % 4]),
    }
}

/// Replaces the bytes of integers of a quantised weight, given the row. Scales and minima stay.
fn with_integers(weight: &mut Weight, mut byte: impl FnMut(usize) -> u8) {
    let WeightType { format, .. } = weight.weight_type;
    let (rows, columns) = (weight.weight_type.rows(), weight.weight_type.columns());
    let row_bytes = weight.bytes.len() / rows.max(1);
    for (row, bytes) in weight.bytes.chunks_mut(row_bytes.max(1)).enumerate() {
        match format {
            WeightFormat::Block(block) => {
                let kept = scale_bytes(block);
                for bytes in bytes.chunks_mut(block.bytes()) {
                    let changed = bytes.iter_mut().enumerate().filter(|(index, _)| !kept.contains(index));
                    changed.for_each(|(_, integer)| *integer = byte(row));
                }
            }
            WeightFormat::Group(group) => {
                let integers = group.row(columns).map_or(0..0, |row| row.integers);
                bytes[integers].fill_with(|| byte(row));
            }
            other => unreachable!("{other} has no integers"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::{Numbers, judge};

    /// The elements of a tensor operand.
    fn values(operand: &Option<Operand>) -> Option<&Tensor> {
        match operand {
            Some(Operand::Tensor(input)) => Some(&input.tensor),
            _ => None,
        }
    }

    /// The limits must let an honest kernel pass: one that decodes weights to f32 and adds products of f32 one after the other.
    #[test]
    fn a_running_sum_of_f32_passes_every_case() {
        let drawn = |index| {
            let id = crate::draw::DrawnId::numbered("linear_a8", DType::F32, 1, index);
            drawn_linear_a8(DType::F32, &mut Draw::new(id))
        };
        let (mut judged, mut farthest) = (0, 0f64);
        for case in linear_a8(DType::F32).into_iter().chain((0..100).map(drawn)) {
            let [call] = case.calls.as_slice() else { unreachable!("the case has one call") };
            let [x, scales, weight, bias] = call.operands.as_slice() else {
                unreachable!("the op has four operands")
            };
            let (x, scales, bias) = (values(x).unwrap(), values(scales).unwrap(), values(bias));
            let Some(Operand::Weight(weight)) = weight else { unreachable!("the third is a weight") };
            let elements = weight::decode(&weight.weight_type, &weight.bytes);
            let (inputs, groups, outputs) = (x.shape[1], scales.shape[1], weight.weight_type.rows());
            let (x, scales, bias) = (x.values(), scales.values(), bias.map(Tensor::values));
            let real = call.results[0].layout.real_rows(x.len() / inputs);
            let element = |row: usize, output: usize| {
                let term = |input: usize| {
                    let scale = scales[row * groups + input / (inputs / groups)] as f32;
                    scale * x[row * inputs + input] as f32 * elements[output * inputs + input] as f32
                };
                (0..inputs).map(term).sum::<f32>() + bias.as_ref().map_or(0.0, |bias| bias[output] as f32)
            };
            let found = (0..real).flat_map(|row| (0..outputs).map(move |output| (row, output)));
            let found: Vec<u32> = found.map(|(row, output)| element(row, output).to_bits()).collect();
            let mut expected = call.results[0].clone();
            expected.elements.truncate(found.len());
            let before = vec![0x7FC0_1234; found.len()];
            let numbers = Numbers { strict_nan: true, ..Numbers::default() };
            let verdict = judge(DType::F32, &[real, outputs], &expected, &found, &before, &numbers);
            assert_eq!(verdict.failures, Vec::<String>::new(), "{}", case.id);
            farthest = verdict.worst.map_or(farthest, |worst| farthest.max(worst.ratio));
            judged += found.len();
        }
        assert!(judged > 100_000 && farthest > 0.02, "{judged} elements, {farthest} of the limit");
    }

    #[test]
    fn sums_reach_the_ends_of_integers() {
        let case =
            Product::of(DType::F32, WeightFormat::Group(GroupFormat::INT8), LARGE_SHAPE, Integers::Large, 0);
        let [_, _, inputs] = case.sizes;
        assert!(inputs as i64 * 124 * 124 > i64::from(i32::MAX));
        // The byte 0x80 of a signed weight and an activation of 127, 32 times.
        assert!(32 * 127 * 128 > i32::from(i16::MAX));
    }

    #[test]
    fn inputs_are_whole_blocks_and_groups() {
        let of = |name: &str, inputs, size| inputs_of(WeightFormat::from_name(name).unwrap(), inputs, size);
        assert_eq!(of("q4_k", 96, 48), 768);
        assert_eq!(of("q4_0", 33, 16), 64);
        assert_eq!(of("int4", 33, 11), 44);
        assert_eq!(of("f32", 127, 0), 127);
        assert_eq!(group_of(0, 127), 127);
    }

    #[test]
    fn weights_at_the_ends_keep_their_scales() {
        for format in formats() {
            let columns = 64usize.next_multiple_of(format.granularity());
            let mut weight = drawn_weight(&mut Random::named("extreme"), format, [4, columns], 1.0);
            let before = weight.clone();
            extreme(&mut weight);
            let elements = weight::decode(&weight.weight_type, &weight.bytes);
            assert!(elements.iter().all(|element| element.is_finite()), "{format}");
            if matches!(format, WeightFormat::Dense(_)) {
                continue;
            }
            let [before, after] =
                [before, weight].map(|weight| weight::reals_in_parts(&weight.weight_type, &weight.bytes));
            let sum = |reals: &[Real]| reals.iter().map(|real| real.magnitude).sum::<f64>();
            assert!(sum(&after) > 0.5 * sum(&before), "{format}");
        }
    }
}
