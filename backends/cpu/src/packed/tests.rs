use super::*;
use dsrun_core::{BlockFormat, BytesReader, DType};
use rstest::rstest;
use std::borrow::Cow;

const Q4_0: WeightFormat = WeightFormat::Block(BlockFormat::Q4_0);
const Q4_1: WeightFormat = WeightFormat::Block(BlockFormat::Q4_1);
const Q8_0: WeightFormat = WeightFormat::Block(BlockFormat::Q8_0);
const Q4_K: WeightFormat = WeightFormat::Block(BlockFormat::Q4_K);
const Q6_K: WeightFormat = WeightFormat::Block(BlockFormat::Q6_K);
const F32: WeightFormat = WeightFormat::Dense(DType::F32);
const F16: WeightFormat = WeightFormat::Dense(DType::F16);
const BF16: WeightFormat = WeightFormat::Dense(DType::BF16);

/// A small generator of repeatable noise (xorshift).
struct Noise(u64);

impl Noise {
    fn bits(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    /// In -1..1.
    fn number(&mut self) -> f32 {
        self.bits() as i32 as f32 / (1u32 << 31) as f32
    }
}

/// A matrix in the file's layout, packed, and decoded by the formulas of core.
struct Case {
    packed: PackedMatrix,
    weights: Vec<f32>,
    outputs: usize,
    inputs: usize,
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

fn desc(format: WeightFormat, outputs: usize, inputs: usize) -> WeightDesc {
    let weight_type = WeightType { format, shape: vec![outputs, inputs] };
    WeightDesc { weight_type, immutable: true }
}

/// Bytes of a matrix with every bit pattern of integers and scales of either sign.
fn random_bytes(format: WeightFormat, elements: usize, noise: &mut Noise) -> Vec<u8> {
    let half_bytes = |value: f32| half::f16::from_f32(value).to_le_bytes();
    match format {
        WeightFormat::Block(block) => (0..elements / block.elements())
            .flat_map(|_| {
                let mut bytes: Vec<u8> = (0..block.bytes()).map(|_| noise.bits() as u8).collect();
                let scale = if block == BlockFormat::Q6_K { 208 } else { 0 };
                // Factors of blocks of 256 elements are up to 127.
                let unit = if block.elements() > 32 { 1024.0 } else { 16.0 };
                bytes[scale..scale + 2].copy_from_slice(&half_bytes(noise.number() / unit));
                if matches!(block, BlockFormat::Q4_1 | BlockFormat::Q4_K | BlockFormat::Q5_K) {
                    bytes[2..4].copy_from_slice(&half_bytes(noise.number() / (unit / 16.0)));
                }
                bytes
            })
            .collect(),
        WeightFormat::Dense(DType::F32) => (0..elements).flat_map(|_| noise.number().to_le_bytes()).collect(),
        WeightFormat::Dense(DType::F16) => (0..elements).flat_map(|_| half_bytes(noise.number())).collect(),
        _ => (0..elements).flat_map(|_| half::bf16::from_f32(noise.number()).to_le_bytes()).collect(),
    }
}

impl Case {
    fn new(format: WeightFormat, outputs: usize, inputs: usize) -> Self {
        let mut noise = Noise(0x9E37_79B9 + (outputs * 1000 + inputs) as u64);
        Self::from_bytes(format, outputs, inputs, &random_bytes(format, outputs * inputs, &mut noise))
    }

    fn from_bytes(format: WeightFormat, outputs: usize, inputs: usize, bytes: &[u8]) -> Self {
        let desc = desc(format, outputs, inputs);
        let mut reader = BytesReader::new(desc.weight_type.clone(), bytes).unwrap();
        let packed = PackedMatrix::pack(&desc, &mut reader, &pool(2)).unwrap();
        assert_eq!(packed.bytes(), layout(&desc).unwrap().bytes);
        let mut weights = vec![0.0; outputs * inputs];
        let row_bytes = desc.weight_type.row_bytes().unwrap();
        if inputs > 0 {
            for (row, out) in bytes.chunks_exact(row_bytes).zip(weights.chunks_exact_mut(inputs)) {
                format.decode_row(row, out).unwrap();
            }
        }
        Self { packed, weights, outputs, inputs }
    }

    fn x(&self, rows: usize) -> Vec<f32> {
        let mut noise = Noise(0xC0FF_EE00 + rows as u64);
        (0..rows * self.inputs).map(|_| noise.number()).collect()
    }

    fn multiply(&self, instructions: InstructionSet, x: &[f32], rows: usize, threads: usize) -> Vec<f32> {
        // Results must be set, not added to.
        let mut out = vec![f32::NAN; rows * self.outputs];
        self.packed.multiply_with(instructions, x, rows, &mut out, &pool(threads)).unwrap();
        out
    }

    /// The exact result, and how far from it a sum in f32 may be.
    ///
    /// A sum of `n` products has at most one rounding for every product and one for every addition on an element's way
    /// into the result: within its strip, over the strips, and none of the decoded weights, which are those of the
    /// formula to the bit. Each is at most 2^-24 of a partial sum, which is at most the sum of magnitudes. So this bounds
    /// every instruction set, and two of them differ by no more than twice as much.
    fn expect(&self, x: &[f32], row: usize, output: usize) -> (f64, f64) {
        let weights = &self.weights[output * self.inputs..][..self.inputs];
        let x = &x[row * self.inputs..][..self.inputs];
        let products = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
        let (sum, magnitude) =
            products.fold((0.0, 0.0), |(sum, all), product| (sum + product, all + product.abs()));
        let roundings = self.inputs.min(tile::STRIP) + self.inputs.div_ceil(tile::STRIP) + 1;
        (sum, magnitude * roundings as f64 * f64::from(f32::EPSILON) / 2.0 * 1.001)
    }

    fn check(&self, instructions: InstructionSet, rows: usize) {
        let x = self.x(rows);
        let out = self.multiply(instructions, &x, rows, 2);
        for row in 0..rows {
            for output in 0..self.outputs {
                let (expected, bound) = self.expect(&x, row, output);
                let found = f64::from(out[row * self.outputs + output]);
                let close = (found - expected).abs() <= bound;
                assert!(
                    close,
                    "{instructions:?} row {row} output {output}: {found} is not {expected} +- {bound}"
                );
            }
        }
    }
}

#[rstest]
fn products_are_those_of_the_formula(
    #[values(F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K)] format: WeightFormat,
    #[values(0, 1, 2, 3, 17, 64, 257)] outputs: usize,
) {
    let inputs: &[usize] = match format {
        Q4_K | Q6_K => &[256, 768],
        _ if format.is_quantised() => &[32, 96, 288, 576],
        _ => &[1, 7, 33, 255, 256, 300],
    };
    for &inputs in inputs {
        let case = Case::new(format, outputs, inputs);
        for instructions in InstructionSet::available() {
            for rows in [0, 1, 2, 3, 5, 8, 64, 130] {
                if inputs <= 300 || rows < 10 {
                    case.check(instructions, rows);
                }
            }
        }
    }
}

/// A matrix of a group format, and its elements as the packed matrix gives them.
fn grouped(name: &str, outputs: usize, inputs: usize) -> Case {
    let format = WeightFormat::from_name(name).unwrap();
    let WeightFormat::Group(group) = format else { panic!("{name} is no group format") };
    let mut noise = Noise(0xABCD + inputs as u64);
    let mut bytes = vec![0; outputs * format.row_bytes(inputs).unwrap()];
    for row in bytes.chunks_exact_mut(format.row_bytes(inputs).unwrap()) {
        let values: Vec<f32> = (0..inputs).map(|_| noise.number()).collect();
        group.quantise_row(&values, false, row).unwrap();
    }
    let mut case = Case::from_bytes(format, outputs, inputs, &bytes);
    for (index, row) in case.weights.chunks_exact_mut(inputs).enumerate() {
        let formula = row.to_vec();
        case.packed.row(index, row);
        for (found, formula) in row.iter().zip(formula) {
            // Integers and what they are counted from are at most 255 steps, and each is rounded once.
            assert!((found - formula).abs() <= 4.0 * f32::EPSILON, "{name}: {found} for {formula}");
        }
    }
    case
}

#[rstest]
#[case("int8", &[1, 4, 33, 64, 258, 576])]
#[case("int8_bf16", &[96])]
#[case("int8z", &[15, 64])]
#[case("int8g32m_f16", &[96, 288])]
#[case("int8g128", &[256])]
#[case("int4", &[2, 34, 64])]
#[case("int4g32z", &[96, 288])]
#[case("int4g64m_bf16", &[320])]
#[case("int4g128_f16", &[128, 640])]
fn formats_that_are_taken_apart(#[case] name: &str, #[case] inputs: &[usize]) {
    for &inputs in inputs {
        let case = grouped(name, 37, inputs);
        for instructions in InstructionSet::available() {
            for rows in [1, 2, 3, 8, 64] {
                case.check(instructions, rows);
            }
        }
    }
}

#[test]
fn sums_of_integers_are_exact() {
    let mut noise = Noise(0xD0_0D);
    for (outputs, inputs) in [(1, 1), (16, 3), (17, 4), (37, 33), (64, 256), (5, 4099)] {
        let format = WeightFormat::Group(dsrun_core::GroupFormat::INT8);
        let row_bytes = format.row_bytes(inputs).unwrap();
        let mut bytes = vec![0; outputs * row_bytes];
        for row in bytes.chunks_exact_mut(row_bytes) {
            row[..4].copy_from_slice(&noise.number().to_le_bytes());
            row[16..16 + inputs].fill_with(|| noise.bits() as u8);
        }
        let case = Case::from_bytes(format, outputs, inputs, &bytes);
        for rows in [1, 2, 3, 5, 8, 21] {
            let row = |noise: &mut Noise| -> Vec<i8> { (0..inputs).map(|_| noise.bits() as i8).collect() };
            let all: Vec<(Vec<i8>, [f32; 1])> =
                (0..rows).map(|_| (row(&mut noise), [noise.number()])).collect();
            let x = quantised_rows(&all);
            for instructions in InstructionSet::available() {
                let mut out = vec![f32::NAN; rows * outputs];
                case.packed.multiply_integers_with(instructions, &x, &mut out, &pool(2)).unwrap();
                for (index, found) in out.iter().enumerate() {
                    let ((row, [scale]), output) = (&all[index / outputs], index % outputs);
                    let q = &bytes[output * row_bytes + 16..][..inputs];
                    let sum: i64 = row.iter().zip(q).map(|(x, q)| i64::from(*x) * i64::from(*q as i8)).sum();
                    let expected = sum as i32 as f32 * scale * case.packed.scales()[output];
                    assert_eq!(*found, expected, "{instructions:?} {outputs} x {inputs}, {rows} rows");
                }
            }
        }
    }
}

fn quantised_rows<S: AsRef<[f32]>>(rows: &[(Vec<i8>, S)]) -> Vec<QuantisedRow<'_>> {
    rows.iter().map(|(integers, scales)| QuantisedRow { integers, scales: scales.as_ref() }).collect()
}

/// Activations of every pattern of bits but -128, with a scale for each group of 32, are multiplied as their formula says.
#[rstest]
fn quantised_activations_meet_weights_of_every_format(
    #[values(
        "q4_0",
        "q4_1",
        "q8_0",
        "q4_k",
        "q6_k",
        "q5_k",
        "int8",
        "int8g32m_f16",
        "int8g128",
        "int4g32z",
        "int4g128_f16"
    )]
    name: &str,
    #[values(32, 96, 256, 768)] inputs: usize,
    #[values(32, 64)] group: usize,
) {
    let format = WeightFormat::from_name(name).unwrap();
    if format.row_bytes(inputs).is_none() || !inputs.is_multiple_of(group) {
        return;
    }
    let outputs = 37;
    let case = match format {
        WeightFormat::Block(_) => Case::new(format, outputs, inputs),
        _ => grouped(name, outputs, inputs),
    };
    let mut noise = Noise(0xA8);
    for rows in [1, 2, 3, 5, 13, 40] {
        let byte = |noise: &mut Noise| (noise.bits() as i8).max(-127);
        let row = |noise: &mut Noise| {
            let integers: Vec<i8> = (0..inputs).map(|_| byte(noise)).collect();
            (integers, (0..inputs / group).map(|_| noise.number()).collect::<Vec<f32>>())
        };
        let all: Vec<(Vec<i8>, Vec<f32>)> = (0..rows).map(|_| row(&mut noise)).collect();
        for instructions in InstructionSet::available() {
            let mut out = vec![f32::NAN; rows * outputs];
            let x = quantised_rows(&all);
            case.packed.multiply_integers_with(instructions, &x, &mut out, &pool(2)).unwrap();
            for (index, found) in out.iter().enumerate() {
                let ((integers, scales), output) = (&all[index / outputs], index % outputs);
                let weights = &case.weights[output * inputs..][..inputs];
                let (mut sum, mut size) = (0.0, 0.0);
                for (k, (x, weight)) in integers.iter().zip(weights).enumerate() {
                    let product = f64::from(*x) * f64::from(scales[k / group]) * f64::from(*weight);
                    (sum, size) = (sum + product, size + product.abs());
                }
                // The scale and the minimum of a block are applied to sums of their own, each up to 16 times as large as the
                // sum of the weights.
                let limit = 32.0 * f64::from(f32::EPSILON) * (size + 1e-3);
                let error = (f64::from(*found) - sum).abs();
                assert!(error <= limit, "{name} {instructions:?} {rows} x {inputs}: {found} for {sum}");
            }
        }
    }
}

/// Weights that are zero add nothing, to the bit, in formats that have no minimum.
#[rstest]
fn zeros_stay_zeros(
    #[values("q4_0", "q8_0", "q5_0", "q3_k", "q6_k", "mxfp4", "int4g32", "int8g128", "int8")] name: &str,
) {
    let (format, outputs, inputs) = (WeightFormat::from_name(name).unwrap(), 17, 256);
    let mut noise = Noise(0x2E20);
    let mut bytes = vec![0; outputs * format.row_bytes(inputs).unwrap()];
    match format {
        // The integers of 0 are not all zero bits, so blocks are random with a scale of 0.
        WeightFormat::Block(block) => {
            bytes.fill_with(|| noise.bits() as u8);
            let scale = match block {
                BlockFormat::Q6_K => 208,
                BlockFormat::Q3_K => 108,
                _ => 0,
            };
            bytes.chunks_exact_mut(block.bytes()).for_each(|bytes| bytes[scale..scale + 2].fill(0));
            if block == BlockFormat::Mxfp4 {
                bytes.chunks_exact_mut(block.bytes()).for_each(|bytes| bytes[1..].fill(0));
            }
        }
        WeightFormat::Group(group) => {
            // A group whose largest element is the last: all others are zero, and have its scale.
            let mut row: Vec<f32> = vec![0.0; inputs];
            row.iter_mut().step_by(32).for_each(|weight| *weight = 1.0 / 3.0);
            for bytes in bytes.chunks_exact_mut(format.row_bytes(inputs).unwrap()) {
                group.quantise_row(&row, false, bytes).unwrap();
            }
        }
        other => panic!("{other} is not quantised"),
    }
    let case = Case::from_bytes(format, outputs, inputs, &bytes);
    // Only inputs whose weights are zero.
    let integers: Vec<i8> = (0..inputs).map(|k| if k % 32 == 0 { 0 } else { 127 - (k % 7) as i8 }).collect();
    let row = (integers, vec![0.3f32; inputs / 32]);
    for instructions in InstructionSet::available() {
        let mut out = vec![f32::NAN; outputs];
        let rows = [row.clone()];
        case.packed.multiply_integers_with(instructions, &quantised_rows(&rows), &mut out, &pool(1)).unwrap();
        assert!(out.iter().all(|y| *y == 0.0), "{name} {instructions:?}: {out:?}");
    }
}

#[test]
fn products_of_integers_need_rows_and_weights_that_fit() {
    let (integers, scales) = ([1; 64], [1.0; 2]);
    let fits = |packed: &PackedMatrix, inputs: usize, groups: usize, outputs: usize| {
        let row = QuantisedRow { integers: &integers[..inputs], scales: &scales[..groups] };
        let mut out = vec![0.0; outputs];
        packed.multiply_integers(&[row], &mut out, &pool(1)).map_err(|error| error.code())
    };
    let invalid = Err(Code::InvalidArgument);
    assert_eq!(fits(&Case::new(F32, 4, 32).packed, 32, 1, 4), invalid, "floats");
    assert_eq!(fits(&grouped("int8", 4, 32).packed, 32, 1, 4), Ok(()));
    assert_eq!(fits(&grouped("int8", 4, 31).packed, 32, 1, 4), invalid, "inputs");
    assert_eq!(fits(&grouped("int8", 5, 32).packed, 32, 1, 4), invalid, "outputs");
    assert_eq!(fits(&Case::new(Q4_1, 4, 64).packed, 64, 2, 4), Ok(()));
    assert_eq!(fits(&Case::new(Q4_1, 4, 64).packed, 64, 1, 4), Ok(()));
}

#[rstest]
fn every_number_of_rows_is_computed(#[values(F16, Q4_1)] format: WeightFormat) {
    let case = Case::new(format, 33, 64);
    for instructions in InstructionSet::available() {
        for rows in 1..40 {
            case.check(instructions, rows);
        }
    }
}

#[rstest]
fn a_row_does_not_depend_on_its_batch_or_the_threads(
    #[values(F32, F16, BF16, Q4_0, Q4_1, Q8_0)] format: WeightFormat,
) {
    let case = Case::new(format, 200, 544);
    let x = case.x(70);
    for instructions in InstructionSet::available() {
        let all = case.multiply(instructions, &x, 70, 1);
        for (rows, threads) in
            [(1, 1), (1, 3), (2, 2), (3, 1), (4, 2), (7, 2), (13, 1), (24, 3), (25, 2), (70, 3)]
        {
            let some = case.multiply(instructions, &x[..rows * case.inputs], rows, threads);
            let equal = some.iter().zip(&all).all(|(some, all)| some.to_bits() == all.to_bits());
            assert!(equal, "{instructions:?} {rows} rows on {threads} threads");
        }
    }
}

#[rstest]
fn rows_decode_by_the_formula(#[values(F32, F16, BF16, Q4_0, Q4_1, Q8_0)] format: WeightFormat) {
    let case = Case::new(format, 35, 96);
    let mut out = vec![f32::NAN; 96];
    for (index, weights) in case.weights.chunks_exact(96).enumerate() {
        case.packed.row(index, &mut out);
        assert_eq!(out, weights);
    }
    for outside in [35, 47, 48, usize::MAX] {
        out.fill(1.0);
        case.packed.row(outside, &mut out);
        assert_eq!(out, [0.0; 96]);
    }
    // More room than elements, and less.
    let mut out = vec![f32::NAN; 100];
    case.packed.row(1, &mut out);
    assert_eq!((&out[..96], &out[96..]), (&case.weights[96..192], &[0.0; 4][..]));
    case.packed.row(1, &mut out[..5]);
    assert_eq!(out[..5], case.weights[96..101]);
}

/// A row of `x` with a single 1 picks one decoded weight out of the kernels; the sum adds only zeros to it.
#[rstest]
fn kernels_decode_every_integer_exactly(#[values(Q4_0, Q4_1, Q8_0)] format: WeightFormat) {
    let mut noise = Noise(7);
    let mut bytes = random_bytes(format, 256 * 32, &mut noise);
    let WeightFormat::Block(block) = format else { panic!("a block format") };
    let header = if block == BlockFormat::Q4_1 { 4 } else { 2 };
    for (row, block) in bytes.chunks_exact_mut(block.bytes()).enumerate() {
        block[header..].fill(row as u8);
        // The smallest scale there is, and the largest.
        match row % 3 {
            0 => block[..2].copy_from_slice(&half::f16::from_bits(1).to_le_bytes()),
            1 => block[..2].copy_from_slice(&half::f16::MAX.to_le_bytes()),
            _ => {}
        }
    }
    let case = Case::from_bytes(format, 256, 32, &bytes);
    let mut x = vec![0.0; 32 * 32];
    (0..32).for_each(|index| x[index * 32 + index] = 1.0);
    for instructions in InstructionSet::available() {
        for rows in [1, 2, 32] {
            let out = case.multiply(instructions, &x[..rows * 32], rows, 1);
            for (index, found) in out.iter().enumerate() {
                let (row, output) = (index / 256, index % 256);
                assert_eq!(
                    *found,
                    case.weights[output * 32 + row],
                    "{instructions:?} input {row} of output {output}"
                );
            }
        }
    }
}

#[rstest]
fn nan_and_infinity_stay_in_their_row(
    #[values(F32, Q4_1, Q8_0)] format: WeightFormat,
    #[values(f32::NAN, f32::INFINITY)] poison: f32,
    #[values(2, 7, 30)] rows: usize,
) {
    let case = Case::new(format, 40, 320);
    let clean = case.x(rows);
    let mut poisoned = clean.clone();
    poisoned[case.inputs + 300] = poison;
    for instructions in InstructionSet::available() {
        let expected = case.multiply(instructions, &clean, rows, 2);
        let found = case.multiply(instructions, &poisoned, rows, 2);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            if index / case.outputs == 1 {
                let weight = case.weights[index % case.outputs * case.inputs + 300];
                let product = poison * weight;
                assert!(*found == product || found.is_nan() && product.is_nan(), "{index}: {found}");
            } else {
                assert_eq!(found, expected);
            }
        }
    }
}

#[test]
fn products_of_empty_matrices_are_zeros() {
    for (outputs, inputs, rows) in [(5, 0, 3), (0, 32, 3), (5, 32, 0)] {
        let case = Case::new(F32, outputs, inputs);
        let out = case.multiply(InstructionSet::best(), &case.x(rows), rows, 1);
        assert_eq!(out, vec![0.0; rows * outputs]);
    }
}

#[test]
fn panels_take_no_more_than_the_file() {
    for (format, bytes) in
        [(F32, 4.0), (F16, 2.0), (BF16, 2.0), (Q4_0, 0.5625), (Q4_1, 0.625), (Q8_0, 1.0625)]
    {
        let layout = layout(&desc(format, 1024, 64)).unwrap();
        assert_eq!(layout.bytes as f64, 1024.0 * 64.0 * bytes, "{format}");
        assert!(layout.name.contains(&format.name()));
    }
}

#[test]
fn many_pieces_give_the_same_matrix() {
    // 5 MiB of f32: two pieces, the second of which ends within a panel.
    let case = Case::new(F32, 1300, 1024);
    let mut out = vec![0.0; 1024];
    for index in [0, 1023, 1024, 1025, 1299] {
        case.packed.row(index, &mut out);
        assert_eq!(out, case.weights[index * 1024..][..1024]);
    }
}

/// A reader that claims a type but has other bytes.
struct Liar(WeightType, usize);

impl WeightReader for Liar {
    fn weight_type(&self) -> &WeightType {
        &self.0
    }

    fn rows(&mut self, _: usize, _: usize) -> Result<Cow<'_, [u8]>> {
        Ok(vec![0; self.1].into())
    }
}

#[test]
fn unsupported_formats_and_bad_readers_are_refused() {
    let error = layout(&desc(WeightFormat::Dense(DType::I8), 4, 4)).unwrap_err();
    assert_eq!(error.code(), Code::Unsupported);
    assert!(error.message().contains("i8"), "{error}");
    for (outputs, inputs) in [(4, 33), (usize::MAX, 64), (2, usize::MAX / 32 * 32), (usize::MAX / 36, 32)] {
        assert_eq!(layout(&desc(Q8_0, outputs, inputs)).unwrap_err().code(), Code::InvalidArgument);
    }

    let wanted = desc(F32, 4, 4);
    let other = desc(F32, 4, 5).weight_type;
    assert!(PackedMatrix::pack(&wanted, &mut Liar(other, 64), &pool(1)).is_err());
    for bytes in [0, 63, 65] {
        let mut reader = Liar(wanted.weight_type.clone(), bytes);
        assert!(PackedMatrix::pack(&wanted, &mut reader, &pool(1)).is_err(), "{bytes}");
    }
}

#[test]
fn operands_of_the_wrong_length_are_refused() {
    let case = Case::new(F32, 4, 3);
    for (x, rows, out) in [(6, 2, 7), (5, 2, 8), (6, usize::MAX, 8)] {
        let found = case.packed.multiply(&vec![0.0; x], rows, &mut vec![0.0; out], &pool(1));
        assert_eq!(found.unwrap_err().code(), Code::InvalidArgument);
    }
}
