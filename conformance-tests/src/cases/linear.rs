//! Cases of `linear`, and the weights that other tables use too.

use super::{
    plane::{self, drawn_layout},
    wanted::is_wanted,
};
use crate::{
    case::{CallCase, Case, Expected, Layout, Operand, Weight},
    draw::Draw,
    gate::Gate,
    oracle::{float, linear, weight},
    random::{Random, Values},
    tensor::Tensor,
};
use dsrun_core::{BlockFormat, DType, GroupFormat, GroupOffset, WeightFormat, WeightType, op::Linear};
use std::ops::Range;

/// A random weight whose elements are of the order of `size`, with their decoded values.
pub(crate) fn random_weight(
    random: &mut Random,
    format: WeightFormat,
    shape: [usize; 2],
    size: f64,
) -> (Weight, Vec<f64>) {
    let weight = drawn_weight(random, format, shape, size);
    let elements = weight::decode(&weight.weight_type, &weight.bytes);
    (weight, elements)
}

/// [`random_weight`] without its elements.
pub(crate) fn drawn_weight(
    random: &mut Random,
    format: WeightFormat,
    shape: [usize; 2],
    size: f64,
) -> Weight {
    let weight_type = WeightType { format, shape: shape.to_vec() };
    let bytes = match format {
        WeightFormat::Dense(dtype) => random.matrix(dtype, shape, Values::HeavyTailed, size).bytes(),
        WeightFormat::Block(block) => {
            let blocks = shape[0] * shape[1] / block.elements();
            (0..blocks).flat_map(|_| random_block(random, block, size)).collect()
        }
        WeightFormat::Group(format) => {
            (0..shape[0]).flat_map(|_| random_row(random, format, shape[1], size)).collect()
        }
        other => unreachable!("the suite makes no weights of format {other}"),
    };
    Weight { weight_type, bytes }
}

/// A block of random bytes, with scales that make its elements of the order of `size`.
fn random_block(random: &mut Random, format: BlockFormat, size: f64) -> Vec<u8> {
    if format == BlockFormat::Mxfp4 {
        let mut bytes: Vec<u8> = (0..format.bytes()).map(|_| random.bits() as u8).collect();
        // The root mean square of the 4-bit floats is about 3.
        let exponent = (size / 3.0).log2().round() as i32 + random.below(3) as i32 - 1;
        bytes[0] = (127 + exponent).clamp(0, 254) as u8;
        return bytes;
    }
    // The largest factor of the first scale, and that of the second, if there is one.
    let (levels, minimum) = match format {
        BlockFormat::Q4_0 => (6.0, None),
        BlockFormat::Q4_1 => (6.0, Some(-1.0)),
        BlockFormat::Q5_0 => (12.0, None),
        BlockFormat::Q5_1 => (12.0, Some(-1.0)),
        BlockFormat::Q2_K => (25.0, Some(10.0)),
        BlockFormat::Q3_K => (60.0, None),
        BlockFormat::Q4_K => (400.0, Some(40.0)),
        BlockFormat::Q5_K => (800.0, Some(40.0)),
        BlockFormat::Q6_K => (1500.0, None),
        _ => (100.0, None),
    };
    let mut bytes: Vec<u8> = (0..format.bytes()).map(|_| random.bits() as u8).collect();
    // Scales of files are negative now and then.
    let sign = random.pick(&[1.0, 1.0, 1.0, -1.0]);
    let scale = sign * random.between(0.5, 1.5) / levels;
    let scales = [Some(scale), minimum.map(|minimum| random.between(0.0, 1.5) / minimum)];
    for (index, scale) in scales.into_iter().flatten().enumerate() {
        let at = scale_bytes(format).start + 2 * index;
        bytes[at..at + 2].copy_from_slice(&half::f16::from_f64(scale * size).to_le_bytes());
    }
    bytes
}

/// The bytes of a block that hold its scales: one or two of f16, or an exponent.
pub(super) const fn scale_bytes(format: BlockFormat) -> Range<usize> {
    match format {
        BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4_K | BlockFormat::Q5_K => 0..4,
        BlockFormat::Q2_K => 80..84,
        BlockFormat::Q3_K => 108..110,
        BlockFormat::Q6_K => 208..210,
        BlockFormat::Mxfp4 => 0..1,
        _ => 0..2,
    }
}

/// A row of random integers, with scales that make its elements of the order of `size`.
fn random_row(random: &mut Random, format: GroupFormat, columns: usize, size: f64) -> Vec<u8> {
    let Some(row) = format.row(columns) else { unreachable!("{columns} columns are no row of {format}") };
    let levels = (1u32 << format.bits.bits()) as f64;
    let mut bytes = vec![0; row.bytes];
    let dtype = format.scale.dtype();
    let mut write = |at: usize, value: f64| {
        bytes[at..at + dtype.bytes()]
            .copy_from_slice(&float::bits(dtype, value).to_le_bytes()[..dtype.bytes()]);
    };
    for group in 0..row.groups {
        write(group * dtype.bytes(), random.between(1.0, 3.0) / levels * size);
        if format.offset == GroupOffset::Minimum {
            write(row.offsets.start + group * dtype.bytes(), random.between(-1.5, 0.0) * size);
        }
    }
    if format.offset == GroupOffset::ZeroPoint {
        // Mostly values near the middle, and some from the whole range of a byte.
        bytes[row.offsets].fill_with(|| match random.below(8) {
            0 => random.bits() as u8,
            _ => (levels * random.between(0.3, 0.7)) as u8,
        });
    }
    bytes[row.integers].fill_with(|| random.bits() as u8);
    bytes
}

/// Label, rows, outputs, inputs and layout of each case.
pub(super) type Shape = (&'static str, usize, usize, usize, Layout);

const fn layout(gap: usize, bounded: bool, extent: Option<usize>) -> Layout {
    Layout { gap, offset: 0, bounded, extent }
}

const PLAIN: Layout = layout(0, false, None);

/// Shapes whose inputs are multiples of 32; formats with larger blocks or groups round them up.
const SHAPES: &[Shape] = &[
    ("no_rows", 0, 8, 32, PLAIN),
    ("one_output", 1, 1, 32, PLAIN),
    ("one_row", 1, 65, 160, PLAIN),
    ("two_rows", 2, 31, 64, PLAIN),
    ("seven_rows", 7, 32, 96, PLAIN),
    ("below_a_tile", 15, 63, 128, PLAIN),
    ("above_a_tile", 17, 129, 160, PLAIN),
    ("many_rows", 67, 33, 64, PLAIN),
    ("long_sum", 3, 5, 14_336, PLAIN),
    ("strided", 5, 24, 64, layout(16, false, None)),
    ("strided_oddly", 5, 23, 64, layout(3, false, None)),
    ("bounded_full", 6, 24, 64, layout(0, true, None)),
    ("extent", 9, 24, 64, layout(8, true, Some(7))),
    ("extent_of_one", 33, 40, 32, layout(0, true, Some(1))),
    ("extent_of_nothing", 6, 24, 64, layout(0, true, Some(0))),
];

/// Shapes that some formats cannot have; the last is for dense weights only.
const DENSE_SHAPES: &[Shape] = &[
    ("one_element", 1, 1, 1, PLAIN),
    ("one_odd_row", 1, 61, 1027, PLAIN),
    ("odd", 7, 31, 33, PLAIN),
    ("prime", 13, 61, 127, layout(1, false, None)),
    // So large that a backend may write all rows and restore those past the extent.
    ("large_extent", 70, 30_000, 16, layout(0, true, Some(67))),
];

/// Cases for dense weights only, which a device may run in tiles of 16 outputs by up to 128 rows.
const BATCHES: &[Shape] = &[
    ("batch", 40, 80, 160, PLAIN),
    ("batch_strided", 128, 48, 264, layout(8, false, None)),
    ("batch_extent", 100, 112, 192, layout(0, true, Some(77))),
    ("batch_extent_of_nothing", 32, 48, 64, layout(0, true, Some(0))),
];

/// Cases for group formats, with more rows than a tile has and more inputs than one block of threads takes.
const GROUP_BATCHES: &[Shape] = &[
    ("batch_strided", 18, 48, 160, layout(8, false, None)),
    ("batch_extent", 100, 16, 96, layout(0, true, Some(77))),
    ("batch_of_tiles", 131, 16, 32, PLAIN),
    ("batch_long_sum", 17, 16, 2048, PLAIN),
];

/// Cases for dense weights only, which a device may run in tiles of 8 outputs by more rows.
const TILES: &[Shape] = &[
    ("tiles", 300, 4216, 16, PLAIN),
    ("tiles_extent", 270, 4224, 8, layout(8, true, Some(140))),
    ("tiles_extent_of_nothing", 129, 8448, 8, layout(0, true, Some(0))),
    ("batch_f32_bias", 40, 80, 160, PLAIN),
    ("tiles_f32_bias", 300, 1032, 16, layout(8, true, Some(290))),
];

/// Cases for dense weights only, just over sizes at which kernels change.
const THRESHOLDS: &[Shape] = &[
    ("rows_257", 257, 3, 8, PLAIN),
    ("rows_1025", 1025, 2, 8, PLAIN),
    ("rows_8193", 8193, 1, 4, PLAIN),
    ("rows_65537", 65_537, 1, 2, PLAIN),
    ("outputs_1025", 2, 1025, 8, PLAIN),
    ("outputs_8193", 2, 8193, 4, PLAIN),
    ("outputs_65537", 1, 65_537, 8, PLAIN),
    ("inputs_8193", 2, 2, 8193, PLAIN),
    ("inputs_16385", 1, 2, 16_385, PLAIN),
    ("inputs_65537", 1, 1, 65_537, PLAIN),
    // Many rows of more outputs than one thread or vector has.
    ("rows_37_outputs_8201", 37, 8201, 2, PLAIN),
    ("rows_1033_outputs_33", 1033, 33, 8, PLAIN),
];

/// Cases for dense weights only, whose activations are zero but for a few: in a long sum of many terms the gate hides one that is
/// left out, here it shows. Rows enough for kernels of one row, of a few and of tiles.
const SPARSE: &[(&str, [usize; 3])] = &[
    ("sparse_inputs_4099", [37, 3, 4099]),
    ("sparse_inputs_16387", [6, 2, 16_387]),
    ("sparse_inputs_65539", [5, 2, 65_539]),
    ("sparse_row_of_65539", [1, 2, 65_539]),
];

/// The dense formats, the block formats, and group formats with every group size, offset and type of scale.
pub(crate) fn formats() -> Vec<WeightFormat> {
    let dense = [DType::F32, DType::F16, DType::BF16].map(WeightFormat::Dense);
    let groups = [
        "int8",
        "int8_bf16",
        "int8z",
        "int8g32m_f16",
        "int8g128",
        "int4",
        "int4m_bf16",
        "int4g32_f16",
        "int4g32m",
        "int4g64z_bf16",
        "int4g128_f16",
        "int4g128z_f16",
    ];
    let groups = groups.into_iter().filter_map(WeightFormat::from_name);
    dense.into_iter().chain(BlockFormat::ALL.map(WeightFormat::Block)).chain(groups).collect()
}

/// The smallest number of columns that is at least `columns` and that a format supports.
pub(super) fn columns_of(format: WeightFormat, columns: usize) -> usize {
    columns.next_multiple_of(format.granularity())
}

/// Whether weights of a format are used with activations of an element type. Dense weights of another type are used with f32
/// only, as on CPUs.
pub(crate) fn goes_with(format: WeightFormat, dtype: DType) -> bool {
    !matches!(format, WeightFormat::Dense(stored) if stored != dtype && dtype != DType::F32)
}

/// The type of the bias of a case with this label, if it has one. Models keep biases in f32, whatever the type of the activations.
pub(super) fn bias_type(label: &str, dtype: DType, biased: bool) -> Option<DType> {
    if label.ends_with("f32_bias") { Some(DType::F32) } else { biased.then_some(dtype) }
}

/// A product of activations and a weight.
struct Product {
    id: String,
    format: WeightFormat,
    /// The numbers of rows, outputs and inputs.
    sizes: [usize; 3],
    layout: Layout,
    values: Values,
    /// The element type of the bias, if there is one.
    bias: Option<DType>,
    /// The element type of the result: logits are f32 for all activations.
    to: DType,
    random: Random,
}

pub(super) fn linear(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for format in formats().into_iter().filter(|format| goes_with(*format, dtype)) {
        // Formats without blocks can have any number of columns, or any even number.
        let (more, batches, tiles) = match format {
            WeightFormat::Dense(_) => (DENSE_SHAPES, BATCHES, TILES),
            _ if format.granularity() <= 2 => {
                (&DENSE_SHAPES[..DENSE_SHAPES.len() - 1], GROUP_BATCHES, &[][..])
            }
            WeightFormat::Group(_) => (&[][..], GROUP_BATCHES, &[][..]),
            _ => (&[][..], &[][..], &[][..]),
        };
        let shapes = SHAPES.iter().chain(more).chain(batches).chain(tiles).copied();
        for (number, (label, m, n, k, layout)) in shapes.enumerate() {
            let k = columns_of(format, k);
            let id = format!("linear_{format}/{dtype}/{label}");
            if !is_wanted(&id) {
                continue;
            }
            let product = Product {
                random: Random::named(&id),
                id,
                format,
                sizes: [m, n, k],
                layout,
                values: Values::USUAL[number % 3],
                bias: bias_type(label, dtype, number % 2 == 1),
                to: if number % 4 == 3 { DType::F32 } else { dtype },
            };
            cases.push(product.case(dtype));
        }
        if let WeightFormat::Dense(stored) = format {
            cases.push(special_weight_case(dtype, stored));
        }
        if format == WeightFormat::Dense(dtype) {
            let shapes = THRESHOLDS.iter().copied().enumerate();
            cases.extend(shapes.filter_map(|(number, (label, m, n, k, layout))| {
                let id = format!("linear_{format}/{dtype}/{label}");
                let values = Values::USUAL[number % 2];
                let (random, bias, to) = (Random::named(&id), (number % 2 == 1).then_some(dtype), dtype);
                let product = Product { id, format, sizes: [m, n, k], layout, values, bias, to, random };
                is_wanted(&product.id).then(|| product.case(dtype))
            }));
            let special = [Values::Rare, Values::Zeros, Values::Large];
            cases.extend(special.map(|values| special_case(dtype, values)));
            cases.extend(SPARSE.iter().map(|(label, sizes)| sparse_case(dtype, label, *sizes)));
            cases.push(subnormal_case(dtype));
        }
    }
    cases
}

/// A product of special values.
fn special_case(dtype: DType, values: Values) -> Case {
    let format = WeightFormat::Dense(dtype);
    let id = format!("linear_{format}/{dtype}/special_{}", format!("{values:?}").to_lowercase());
    let (random, layout, bias, to) = (Random::named(&id), PLAIN, None, dtype);
    Product { id, format, sizes: [29, 17, 33], layout, values, bias, to, random }.case(dtype)
}

/// A product with few terms that are not zero: every 61st and the last three of a row.
fn sparse_case(dtype: DType, label: &str, [m, n, k]: [usize; 3]) -> Case {
    let id = format!("linear_{dtype}/{dtype}/{label}");
    let mut random = Random::named(&id);
    let mut x = random.tensor(dtype, &[m, k], Values::Uniform);
    for row in x.bits.chunks_mut(k) {
        let hidden = |column: &usize| !column.is_multiple_of(61) && column + 3 < k;
        (0..k).filter(hidden).for_each(|column| row[column] = 0);
    }
    let (weight, elements) = random_weight(&mut random, WeightFormat::Dense(dtype), [n, k], 1.0);
    dense_case(dtype, id, x, (weight, elements), [m, n, k])
}

/// What zero multiplies is not skipped: it may be NaN or infinite. Each of the first rows of the weight has NaN or infinity in one
/// place, each of the last rows of the activations NaN, in columns of vectors and of the remainder; every third number is zero.
fn special_weight_case(dtype: DType, stored: DType) -> Case {
    let [m, n, k] = [23, 40, 77];
    let id = format!("linear_{stored}/{dtype}/special_weights");
    let mut random = Random::named(&id);
    let mut plane = |dtype: DType, rows: usize| {
        let shape = [rows, k];
        let mut values = random.tensor(dtype, &shape, Values::Uniform).values();
        (0..rows * k).filter(|at| (at / k + at % k).is_multiple_of(3)).for_each(|at| values[at] = 0.0);
        values
    };
    let (mut x, mut elements) = (plane(dtype, m), plane(stored, n));
    for row in 0..n / 2 {
        let number = if row.is_multiple_of(2) { f64::NAN } else { f64::INFINITY };
        elements[row * k + (37 * row + 72) % k] = number;
    }
    for row in m / 2..m {
        x[row * k + (29 * row + 73) % k] = f64::NAN;
    }
    let (x, stored) = (Tensor::floats(dtype, &[m, k], &x), Tensor::floats(stored, &[n, k], &elements));
    let weight_type = WeightType { format: WeightFormat::Dense(stored.dtype), shape: vec![n, k] };
    let weight = Weight { weight_type, bytes: stored.bytes() };
    dense_case(dtype, id, x, (weight, stored.values()), [m, n, k])
}

/// A product with a dense weight, given with its elements.
fn dense_case(dtype: DType, id: String, x: Tensor, weight: (Weight, Vec<f64>), sizes: [usize; 3]) -> Case {
    let (weight, elements) = weight;
    let expected = Expected::reals(linear::linear(&x.values(), &elements, None, sizes));
    let operands = vec![Operand::tensor(x), Operand::weight(weight), None];
    Case::new(id, CallCase::new(Linear { dtype }, operands, vec![expected]))
}

/// Subnormal activations and large weights, whose products are normal numbers.
fn subnormal_case(dtype: DType) -> Case {
    let [m, n, k] = [9, 17, 40];
    let id = format!("linear_{dtype}/{dtype}/special_subnormals");
    let mut random = Random::named(&id);
    let x = random.tensor(dtype, &[m, k], Values::Subnormal);
    let size = 2f64.powi(if dtype == DType::F16 { 9 } else { 100 });
    let weight = random_weight(&mut random, WeightFormat::Dense(dtype), [n, k], size);
    dense_case(dtype, id, x, weight, [m, n, k])
}

/// Numbers of inputs and outputs of random cases; 128 and 256 are tile sizes of large products.
pub(super) const INPUTS: &[usize] = &[32, 1, 2, 7, 61, 64, 127, 128, 129, 160, 256, 1024, 4099];
pub(super) const OUTPUTS: &[usize] = &[1, 2, 7, 8, 31, 32, 61, 63, 64, 65, 127, 128, 129];
/// The maximum number of multiplications of a random case.
pub(super) const MULTIPLICATIONS: usize = 1 << 19;

pub(super) fn drawn_linear(dtype: DType, draw: &mut Draw) -> Case {
    let there: Vec<WeightFormat> = [WeightFormat::Dense(dtype)]
        .into_iter()
        .chain(formats())
        .chain(GroupFormat::all().map(WeightFormat::Group))
        .filter(|format| goes_with(*format, dtype))
        .collect();
    let format = draw.pick(&there);
    let (n, k) = (draw.pick(OUTPUTS), draw.pick(INPUTS));
    let k = columns_of(format, k);
    let m = draw.pick(plane::ROWS).min((MULTIPLICATIONS / (n * k)).max(1));
    let product = Product {
        id: draw.id(),
        format,
        sizes: [m, n, k],
        layout: Layout { offset: 0, ..drawn_layout(draw, m) },
        values: draw.pick(&Values::USUAL),
        bias: draw.sometimes().then_some(dtype),
        to: draw.pick(&[dtype, DType::F32]),
        random: draw.values(),
    };
    product.case(dtype)
}

impl Product {
    fn case(self, dtype: DType) -> Case {
        let Self { id, format, sizes: [m, n, k], layout, values, bias, to, mut random } = self;
        let x = random.tensor(dtype, &[m, k], values);
        let size = 1.0 / (k as f64).sqrt();
        let (weight, elements) = random_weight(&mut random, format, [n, k], size);
        let bias = bias.map(|dtype| random.tensor(dtype, &[n], Values::HeavyTailed));
        let biases = bias.as_ref().map(|bias| bias.values());
        let reals = linear::linear(&x.values(), &elements, biases.as_deref(), [m, n, k]);
        let gate = Gate { inner: format.is_quantised().then_some(dtype), exponential: false };
        let expected = Expected::reals(reals).gated(gate).laid(Layout { offset: 1, ..layout }, n);
        let operands =
            vec![Operand::laid(x, layout), Operand::weight(weight), bias.and_then(Operand::tensor)];
        Case::new(id, CallCase::new(Linear { dtype: to }, operands, vec![expected]))
    }
}
