//! Every expression against a plain evaluation of whole matrices in f32.

use super::*;
use crate::weights::slice_rows;
use dsrun_core::BlockFormat;
use proptest::prelude::*;
use rstest::rstest;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Tensors in memory; remembers what was released.
#[derive(Default)]
struct Memory {
    tensors: BTreeMap<String, (WeightType, Vec<u8>)>,
    released: Mutex<Vec<String>>,
}

impl TensorSource for Memory {
    fn describe(&self) -> String {
        "memory".into()
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn tensor_type(&self, name: &str) -> Result<WeightType> {
        let found = self.tensors.get(name).ok_or_else(|| Error::invalid("no such tensor").at(name))?;
        Ok(found.0.clone())
    }

    fn rows(&self, name: &str, first: usize, count: usize) -> Result<Cow<'_, [u8]>> {
        let (weight_type, bytes) = &self.tensors[name];
        slice_rows(weight_type, bytes, first, count).map(Cow::Borrowed)
    }

    fn release(&self, name: &str) {
        self.released.lock().unwrap().push(name.into());
    }
}

impl Memory {
    /// A tensor whose bytes are `salt + index`, with f16 scales that are small numbers.
    fn with(mut self, name: &str, format: WeightFormat, shape: &[usize], salt: u8) -> Self {
        let weight_type = WeightType { format, shape: shape.to_vec() };
        let elements = weight_type.elements().unwrap();
        let bytes = match format {
            WeightFormat::Dense(DType::F32) => {
                (0..elements).flat_map(|i| (i as f32 * 0.37 + f32::from(salt)).to_le_bytes()).collect()
            }
            WeightFormat::Dense(DType::BF16) => (0..elements)
                .flat_map(|i| half::bf16::from_f32(i as f32 * 0.5 - f32::from(salt)).to_le_bytes())
                .collect(),
            WeightFormat::Dense(_) => (0..elements)
                .flat_map(|i| half::f16::from_f32(i as f32 * 0.25 - f32::from(salt)).to_le_bytes())
                .collect(),
            WeightFormat::Block(block) => {
                let mut bytes: Vec<u8> = (0..weight_type.bytes().unwrap())
                    .map(|i| (i as u8).wrapping_mul(31).wrapping_add(salt))
                    .collect();
                for (i, block) in bytes.chunks_mut(block.bytes()).enumerate() {
                    block[..2].copy_from_slice(&half::f16::from_f32(0.01 * (i + 1) as f32).to_le_bytes());
                    if block.len() == 20 {
                        block[2..4].copy_from_slice(&half::f16::from_f32(-0.5).to_le_bytes());
                    }
                }
                bytes
            }
            _ => unreachable!(),
        };
        self.tensors.insert(name.into(), (weight_type, bytes));
        self
    }

    fn values(&self, name: &str) -> Matrix {
        let (weight_type, bytes) = &self.tensors[name];
        let mut values = vec![0.0; weight_type.elements().unwrap()];
        let rows = bytes.chunks(weight_type.row_bytes().unwrap());
        for (row, out) in rows.zip(values.chunks_mut(weight_type.columns())) {
            weight_type.format.decode_row(row, out).unwrap();
        }
        Matrix { shape: weight_type.shape.clone(), values }
    }
}

fn sample() -> Memory {
    let (f32, bf16) = (WeightFormat::Dense(DType::F32), WeightFormat::Dense(DType::BF16));
    Memory::default()
        .with("a", bf16, &[8, 64], 1)
        .with("b", bf16, &[8, 64], 2)
        .with("q", WeightFormat::Block(BlockFormat::Q4_1), &[8, 64], 3)
        .with("r", WeightFormat::Block(BlockFormat::Q4_1), &[4, 64], 4)
        .with("q8", WeightFormat::Block(BlockFormat::Q8_0), &[8, 64], 5)
        .with("f", f32, &[8, 64], 6)
        .with("h", WeightFormat::Dense(DType::F16), &[8, 64], 7)
        .with("v", f32, &[16], 8)
        .with("cube", bf16, &[3, 4, 32], 9)
}

/// The plain evaluation: elements by index, no storage.
struct Matrix {
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Matrix {
    fn at(&self, index: &[usize]) -> f32 {
        let flat = index.iter().zip(&self.shape).fold(0, |flat, (i, size)| flat * size + i);
        self.values[flat]
    }

    fn from_fn(shape: Vec<usize>, value: impl Fn(&[usize]) -> f32) -> Self {
        let count: usize = shape.iter().product();
        let values = (0..count).map(|flat| {
            let mut rest = flat;
            let mut index: Vec<usize> = shape
                .iter()
                .rev()
                .map(|size| {
                    let i = rest % size;
                    rest /= size;
                    i
                })
                .collect();
            index.reverse();
            value(&index)
        });
        Self { values: values.collect(), shape: shape.clone() }
    }
}

fn evaluate(source: &Memory, expr: &WeightExpr) -> Matrix {
    let with = |index: &[usize], dimension: usize, value: usize| {
        let mut index = index.to_vec();
        index[dimension] = value;
        index
    };
    match expr {
        WeightExpr::Tensor(name) => source.values(name),
        WeightExpr::Constant(values) => Matrix { shape: vec![values.len()], values: values.clone() },
        WeightExpr::Slice { of, dimension, start, end } => {
            let of = evaluate(source, of);
            let mut shape = of.shape.clone();
            shape[*dimension] = end - start;
            Matrix::from_fn(shape, |index| of.at(&with(index, *dimension, index[*dimension] + start)))
        }
        WeightExpr::Concat { parts, dimension } => {
            let parts: Vec<_> = parts.iter().map(|part| evaluate(source, part)).collect();
            let mut shape = parts[0].shape.clone();
            shape[*dimension] = parts.iter().map(|part| part.shape[*dimension]).sum();
            Matrix::from_fn(shape, |index| {
                let mut at = index[*dimension];
                let mut parts = parts.iter();
                loop {
                    let part = parts.next().unwrap();
                    if at < part.shape[*dimension] {
                        return part.at(&with(index, *dimension, at));
                    }
                    at -= part.shape[*dimension];
                }
            })
        }
        WeightExpr::Interleave { parts, block } => {
            let parts: Vec<_> = parts.iter().map(|part| evaluate(source, part)).collect();
            let shape = vec![parts[0].shape[0] * parts.len(), parts[0].shape[1]];
            Matrix::from_fn(shape, |index| {
                let (turn, within) = (index[0] / block, index[0] % block);
                parts[turn % parts.len()].at(&[turn / parts.len() * block + within, index[1]])
            })
        }
        WeightExpr::Permute { of, rows } => {
            let of = evaluate(source, of);
            Matrix::from_fn(vec![rows.len(), of.shape[1]], |index| of.at(&[rows[index[0]], index[1]]))
        }
        WeightExpr::Transpose { of } => {
            let of = evaluate(source, of);
            Matrix::from_fn(vec![of.shape[1], of.shape[0]], |index| of.at(&[index[1], index[0]]))
        }
        WeightExpr::Reshape { of, shape } => Matrix { shape: shape.clone(), ..evaluate(source, of) },
        WeightExpr::Scale { of, factor } => {
            let of = evaluate(source, of);
            Matrix { values: of.values.iter().map(|value| value * factor).collect(), ..of }
        }
        WeightExpr::Cast { of, dtype } => {
            let of = evaluate(source, of);
            let round = |value: &f32| match dtype {
                DType::F16 => half::f16::from_f32(*value).to_f32(),
                DType::BF16 => half::bf16::from_f32(*value).to_f32(),
                _ => *value,
            };
            Matrix { values: of.values.iter().map(round).collect(), ..of }
        }
        WeightExpr::Factors { of, factors, rows } => {
            let of = evaluate(source, of);
            Matrix::from_fn(of.shape.clone(), |index| of.at(index) * factors[index[usize::from(!rows)]])
        }
        WeightExpr::Quantise { .. } => panic!("rounding has a test of its own"),
        WeightExpr::Pad { of, before, after } => {
            let of = evaluate(source, of);
            let inside = *before..before + of.shape[0];
            Matrix::from_fn(vec![before + of.shape[0] + after, of.shape[1]], |index| {
                if inside.contains(&index[0]) { of.at(&[index[0] - before, index[1]]) } else { 0.0 }
            })
        }
    }
}

fn tensor(name: &str) -> WeightExpr {
    WeightExpr::tensor(name)
}

fn slice(of: WeightExpr, dimension: usize, start: usize, end: usize) -> WeightExpr {
    WeightExpr::Slice { of: Box::new(of), dimension, start, end }
}

fn concat(parts: Vec<WeightExpr>, dimension: usize) -> WeightExpr {
    WeightExpr::Concat { parts, dimension }
}

fn permute(of: WeightExpr, rows: &[usize]) -> WeightExpr {
    WeightExpr::Permute { of: Box::new(of), rows: rows.to_vec() }
}

fn transpose(of: WeightExpr) -> WeightExpr {
    WeightExpr::Transpose { of: Box::new(of) }
}

fn reshape(of: WeightExpr, shape: &[usize]) -> WeightExpr {
    WeightExpr::Reshape { of: Box::new(of), shape: shape.to_vec() }
}

fn cast(of: WeightExpr, dtype: DType) -> WeightExpr {
    WeightExpr::Cast { of: Box::new(of), dtype }
}

fn scale(of: WeightExpr, factor: f32) -> WeightExpr {
    WeightExpr::Scale { of: Box::new(of), factor }
}

fn pad(of: WeightExpr, before: usize, after: usize) -> WeightExpr {
    WeightExpr::Pad { of: Box::new(of), before, after }
}

fn interleave(parts: Vec<WeightExpr>, block: usize) -> WeightExpr {
    WeightExpr::Interleave { parts, block }
}

/// Reads all rows in every partition into two and each row alone, and compares with the plain evaluation.
fn check(source: &Memory, expr: &WeightExpr) {
    let expected = evaluate(source, expr);
    let mut reader = ExprReader::new(source, expr).unwrap();
    assert_eq!(reader.weight_type().shape, expected.shape, "{expr:?}");
    let rows = reader.weight_type().rows();
    assert_eq!(reader.decoded_rows(0, rows).unwrap(), expected.values, "{expr:?}");
    let all = reader.rows(0, rows).unwrap().into_owned();
    assert_eq!(all.len(), reader.weight_type().bytes().unwrap());
    for cut in 0..=rows {
        let mut joined = reader.rows(0, cut).unwrap().into_owned();
        joined.extend_from_slice(&reader.rows(cut, rows - cut).unwrap());
        assert_eq!(joined, all, "{expr:?} cut at {cut}");
    }
    let single: Vec<u8> = (0..rows).flat_map(|row| reader.rows(row, 1).unwrap().into_owned()).collect();
    assert_eq!(single, all, "{expr:?}");
    assert!(reader.rows(rows, 1).is_err());
    assert!(reader.rows(1, usize::MAX).is_err());
}

#[rstest]
#[case::tensor(tensor("q"))]
#[case::constant(WeightExpr::Constant(vec![1.0, -2.5, 3.0]))]
#[case::slice_of_rows(slice(tensor("q"), 0, 2, 7))]
#[case::empty_slice(slice(tensor("q"), 0, 3, 3))]
#[case::slice_of_columns(slice(tensor("a"), 1, 5, 19))]
#[case::slice_through_blocks(slice(tensor("q"), 1, 5, 39))]
#[case::slice_of_whole_blocks(slice(tensor("q8"), 1, 32, 64))]
#[case::slice_of_vector(slice(tensor("v"), 0, 3, 9))]
#[case::slice_of_cube(slice(tensor("cube"), 1, 1, 3))]
#[case::slice_of_cube_outer(slice(tensor("cube"), 0, 1, 3))]
#[case::slice_of_cube_columns(slice(tensor("cube"), 2, 7, 9))]
#[case::concat_of_rows(concat(vec![tensor("q"), tensor("r"), slice(tensor("q"), 0, 1, 2)], 0))]
#[case::concat_of_columns(concat(vec![tensor("a"), slice(tensor("b"), 1, 0, 3)], 1))]
#[case::concat_of_formats(concat(vec![tensor("q"), tensor("f"), tensor("q8")], 1))]
#[case::concat_of_vectors(concat(vec![tensor("v"), WeightExpr::Constant(vec![9.0])], 0))]
#[case::concat_in_cube(concat(vec![tensor("cube"), slice(tensor("cube"), 1, 0, 1)], 1))]
#[case::interleave(interleave(vec![tensor("a"), tensor("b")], 2))]
#[case::interleave_of_one(interleave(vec![tensor("a")], 4))]
#[case::permute(permute(tensor("q"), &[7, 0, 1, 2, 2, 5]))]
#[case::transpose(transpose(tensor("a")))]
#[case::transpose_of_blocks(transpose(tensor("q")))]
#[case::transpose_of_many_rows(transpose(pad(tensor("h"), 60, 70)))]
#[case::slice_of_a_transpose(slice(transpose(tensor("f")), 0, 17, 40))]
#[case::reshape_of_rows_to_pairs(reshape(tensor("q"), &[4, 128]))]
#[case::second_rows_of_pairs(slice(reshape(tensor("q"), &[4, 128]), 1, 64, 128))]
#[case::reshape_to_a_vector(reshape(tensor("a"), &[8 * 64]))]
#[case::scale(scale(tensor("q"), 0.125))]
#[case::cast_of_blocks(cast(tensor("q"), DType::F16))]
#[case::cast_of_floats(cast(tensor("f"), DType::BF16))]
#[case::cast_of_halves(cast(tensor("h"), DType::F32))]
#[case::pad(pad(tensor("q"), 2, 3))]
#[case::pad_with_nothing(pad(tensor("a"), 0, 0))]
#[case::nested(pad(permute(concat(vec![scale(tensor("q"), 2.0), scale(tensor("r"), -1.0)], 0), &[11, 3, 4]), 1, 0))]
fn expressions_mean_what_they_say(#[case] expr: WeightExpr) {
    check(&sample(), &expr);
}

/// Expressions of 8 x 64 made of each other, so that any two can be combined.
fn same_shape() -> impl Strategy<Value = WeightExpr> {
    let leaf =
        prop_oneof![Just("a"), Just("b"), Just("q"), Just("q8"), Just("f"), Just("h")].prop_map(tensor);
    leaf.prop_recursive(3, 12, 2, |inner| {
        prop_oneof![
            prop::collection::vec(0..8usize, 8).prop_flat_map({
                let inner = inner.clone();
                move |rows| inner.clone().prop_map(move |of| permute(of, &rows))
            }),
            (inner.clone(), 0..=8usize)
                .prop_map(|(of, cut)| concat(vec![slice(of.clone(), 0, cut, 8), slice(of, 0, 0, cut)], 0)),
            (inner.clone(), inner.clone(), 0..=64usize).prop_map(|(left, right, cut)| {
                let (left, right) = (scale(left, 1.0), scale(right, 1.0));
                concat(vec![slice(left, 1, cut, 64), slice(right, 1, 0, cut)], 1)
            }),
            (inner.clone(), 0..4usize).prop_map(|(of, rows)| pad(slice(of, 0, rows, 8 - rows), rows, rows)),
            (inner.clone(), prop_oneof![Just(1usize), Just(2), Just(4)]).prop_map(|(of, block)| {
                let (upper, lower) = (slice(of.clone(), 0, 0, 4), slice(of, 0, 4, 8));
                interleave(vec![upper, lower], block)
            }),
            inner.clone().prop_map(|of| transpose(transpose(of))),
            inner.prop_map(|of| cast(of, DType::BF16)),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn nested_expressions_mean_what_they_say(expr in same_shape()) {
        check(&sample(), &expr);
    }
}

#[rstest]
#[case::tensor(tensor("q"), 0, 8)]
#[case::slice(slice(tensor("q"), 0, 2, 7), 1, 3)]
#[case::inside_one_part_of_a_concat(concat(vec![tensor("q"), tensor("r")], 0), 9, 3)]
#[case::run_of_a_permutation(permute(tensor("q"), &[5, 1, 2, 3]), 1, 3)]
#[case::inside_a_pad(pad(tensor("q"), 4, 0), 4, 8)]
#[case::cast_to_the_same(cast(tensor("a"), DType::BF16), 0, 8)]
#[case::columns_of_one_row(slice(tensor("a"), 1, 3, 9), 2, 1)]
fn rows_that_lie_together_are_not_copied(
    #[case] expr: WeightExpr,
    #[case] first: usize,
    #[case] count: usize,
) {
    let source = sample();
    let mut reader = ExprReader::new(&source, &expr).unwrap();
    assert!(matches!(reader.rows(first, count).unwrap(), Cow::Borrowed(_)));
}

#[test]
fn factors_multiply_columns_or_rows() {
    let source = sample();
    let plain = evaluate(&source, &tensor("q")).values;
    for rows in [false, true] {
        let factors: Vec<f32> = (0..if rows { 8 } else { 64 }).map(|index| 0.5 + index as f32).collect();
        let expr = WeightExpr::Factors { of: Box::new(tensor("q")), factors: factors.clone(), rows };
        let reader = ExprReader::new(&source, &expr).unwrap();
        let found = reader.decoded_rows(2, 5).unwrap();
        for (index, found) in found.iter().enumerate() {
            let (row, column) = (2 + index / 64, index % 64);
            assert_eq!(*found, plain[row * 64 + column] * factors[if rows { row } else { column }]);
        }
    }
}

#[test]
fn rows_are_quantised_as_they_are_read() {
    let source = sample();
    let format = WeightFormat::from_name("int8g32_f16").unwrap();
    let expr = WeightExpr::Quantise { of: Box::new(tensor("f")), format, search: true };
    let mut reader = ExprReader::new(&source, &expr).unwrap();
    let (plain, found) = (evaluate(&source, &tensor("f")), reader.decoded_rows(0, 8).unwrap());
    for (group, values) in found.chunks(32).zip(plain.values.chunks(32)) {
        let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        for (found, value) in group.iter().zip(values) {
            // Half a step, and what the scale is off when it is rounded to f16.
            assert!((found - value).abs() <= largest * (0.5 / 127.0 + 1.0 / 1024.0), "{found} for {value}");
        }
    }
    let whole = reader.rows(0, 8).unwrap().into_owned();
    let row_bytes = reader.weight_type().row_bytes().unwrap();
    assert_eq!(&*reader.rows(3, 2).unwrap(), &whole[3 * row_bytes..5 * row_bytes]);
}

#[rstest]
#[case("q", "q4_1", None)]
#[case("q", "f32", None)]
#[case("q", "bf16", None)]
#[case("f", "f16", None)]
#[case("f", "q8_0", Some("stored as f32 cannot be stored as q8_0"))]
#[case("q8", "q4_0", Some("quantising"))]
#[case("f", "i8", Some("cannot be stored as i8"))]
fn stored_as_converts_or_says_why_not(
    #[case] name: &str,
    #[case] format: &str,
    #[case] refusal: Option<&str>,
) {
    let source = sample();
    let format = WeightFormat::from_name(format).unwrap();
    let stored = ExprReader::new(&source, &tensor(name)).unwrap().stored_as(format);
    if let Some(refusal) = refusal {
        assert!(stored.unwrap_err().to_string().contains(refusal));
        return;
    }
    let mut stored = stored.unwrap();
    assert_eq!(stored.weight_type().format, format);
    let dtype = match format {
        WeightFormat::Dense(dtype) => dtype,
        _ => DType::F32,
    };
    assert_eq!(stored.decoded_rows(0, 8).unwrap(), evaluate(&source, &cast(tensor(name), dtype)).values);
    assert_eq!(stored.rows(3, 2).unwrap().len(), 2 * stored.weight_type().row_bytes().unwrap());
}

#[test]
fn values_beyond_the_target_are_refused() {
    for (value, dtype, fits) in [
        (65519.0, DType::F16, true),
        (65520.0, DType::F16, false),
        (-1e9, DType::F16, false),
        (f32::INFINITY, DType::F16, true),
        (f32::MAX, DType::BF16, false),
        (3e38, DType::BF16, true),
    ] {
        let source = Memory::default();
        let expr = cast(WeightExpr::Constant(vec![value]), dtype);
        let result = ExprReader::new(&source, &expr).unwrap().decoded_rows(0, 1);
        assert_eq!(result.is_ok(), fits, "{value} as {dtype}: {result:?}");
    }
}

#[test]
fn errors_name_source_and_tensor() {
    let source = sample();
    let error = ExprReader::new(&source, &tensor("missing")).unwrap_err().to_string();
    assert!(error.contains("missing") && error.contains("memory"), "{error}");
}

/// Rows that several tasks make, and in the last task fewer than in the others, are those that are read one by one.
#[rstest]
#[case(tensor("w"))]
#[case(transpose(tensor("w")))]
#[case(slice(tensor("w"), 0, 3, 1030))]
fn tasks_join_without_a_seam(#[case] of: WeightExpr) {
    let source = Memory::default().with("w", WeightFormat::Dense(DType::BF16), &[1056, 1056], 1);
    let format = WeightFormat::from_name("int4g32_f16").unwrap();
    let rows_of_w = of.infer(&|name| source.tensor_type(name)).unwrap().rows();
    let factors: Vec<f32> = (0..rows_of_w).map(|row| 1.0 + row as f32).collect();
    let quantised = WeightExpr::Quantise { of: of.clone().into(), format, search: false };
    let multiplied = WeightExpr::Factors { of: of.into(), factors, rows: true };
    for expr in [quantised, multiplied] {
        let mut reader = ExprReader::new(&source, &expr).unwrap();
        let row_bytes = reader.weight_type().row_bytes().unwrap();
        let rows = reader.rows(5, rows_of_w - 5).unwrap().into_owned();
        assert_eq!(rows.len(), (rows_of_w - 5) * row_bytes);
        for row in [5, 128, 129, 500, rows_of_w - 1] {
            assert_eq!(*reader.rows(row, 1).unwrap(), rows[(row - 5) * row_bytes..][..row_bytes], "{row}");
        }
    }
}

#[test]
fn release_reaches_every_tensor() {
    let source = sample();
    ExprReader::new(&source, &concat(vec![tensor("q"), tensor("r")], 0)).unwrap().release();
    assert_eq!(*source.released.lock().unwrap(), ["q", "r"]);
}
