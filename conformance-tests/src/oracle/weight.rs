//! Decoding of stored weights.

use super::{Real, float};
use dsrun_core::{BlockFormat, DType, GroupBits, GroupFormat, GroupOffset, WeightFormat, WeightType};

/// The values of all elements of a weight, row after row, by the formulas of [`BlockFormat`] and [`GroupFormat`].
pub fn decode(weight_type: &WeightType, bytes: &[u8]) -> Vec<f64> {
    reals(weight_type, bytes).into_iter().map(|real| real.value).collect()
}

/// [`decode`] with the magnitude of each element: the sum of the absolute values of its terms, which with zero points and minima
/// are the product of scale and integer and the offset. Products of the scales of GGUF are exact.
pub fn reals(weight_type: &WeightType, bytes: &[u8]) -> Vec<Real> {
    let exact = |value: f64| Real::new(value, value.abs());
    match weight_type.format {
        WeightFormat::Dense(dtype) => {
            bytes.chunks(dtype.bytes()).map(|element| exact(float::value(dtype, word(element)))).collect()
        }
        WeightFormat::Block(format) => {
            let terms = bytes.chunks(format.bytes()).flat_map(|bytes| block(format, bytes));
            terms.map(|[product, minimum]| exact(product + minimum)).collect()
        }
        WeightFormat::Group(format) => {
            let (rows, columns) = (weight_type.rows(), weight_type.columns());
            bytes.chunks(bytes.len() / rows.max(1)).flat_map(|bytes| row(format, bytes, columns)).collect()
        }
        other => unreachable!("the suite makes no weights of format {other}"),
    }
}

/// [`reals`] for sums of products, in which the integers of a block and its minima may be summed apart: the magnitude counts both.
pub fn reals_in_parts(weight_type: &WeightType, bytes: &[u8]) -> Vec<Real> {
    let WeightFormat::Block(format) = weight_type.format else { return reals(weight_type, bytes) };
    let terms = bytes.chunks(format.bytes()).flat_map(|bytes| block(format, bytes));
    terms.map(|[product, minimum]| Real::new(product + minimum, product.abs() + minimum.abs())).collect()
}

/// Reads a little-endian number.
fn word(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte))
}

/// Decodes a row of a group format.
fn row(format: GroupFormat, bytes: &[u8], columns: usize) -> Vec<Real> {
    let (dtype, group) = (format.scale.dtype(), format.group.columns().unwrap_or(columns).max(1));
    let (width, groups) = (dtype.bytes(), if format.group.columns().is_some() { columns / group } else { 1 });
    let number = |at: usize| float::value(dtype, word(&bytes[at..][..width]));
    let offsets = groups * width;
    let head = offsets
        + match format.offset {
            GroupOffset::Symmetric => 0,
            GroupOffset::ZeroPoint => groups,
            GroupOffset::Minimum => groups * width,
        };
    let integers = &bytes[head.div_ceil(16) * 16..];
    let element = |column: usize| {
        let group = column / group;
        let scale = number(group * width);
        let stored = match format.bits {
            GroupBits::Eight => integers[column],
            GroupBits::Four => integers[column / 2] >> (4 * (column % 2)) & 15,
        };
        let (product, from) = match (format.offset, format.bits) {
            (GroupOffset::Symmetric, GroupBits::Eight) => (scale * f64::from(stored as i8), 0.0),
            (GroupOffset::Symmetric, GroupBits::Four) => (scale * (f64::from(stored) - 8.0), 0.0),
            (GroupOffset::ZeroPoint, _) => {
                (scale * f64::from(stored), -scale * f64::from(bytes[offsets + group]))
            }
            (GroupOffset::Minimum, _) => (scale * f64::from(stored), number(offsets + group * width)),
        };
        Real::new(product + from, product.abs() + from.abs())
    };
    (0..columns).map(element).collect()
}

fn half(bytes: &[u8], at: usize) -> f64 {
    float::value(DType::F16, u32::from(bytes[at]) | u32::from(bytes[at + 1]) << 8)
}

/// The elements of a block, each as the product with its integer, and its minimum.
fn block(format: BlockFormat, bytes: &[u8]) -> Vec<[f64; 2]> {
    let nibble = |first: usize, element: usize| {
        let byte = bytes[first + element % 16];
        f64::from(if element < 16 { byte & 15 } else { byte >> 4 })
    };
    let fifth =
        |first: usize, element: usize| f64::from(bytes[first + element / 8] >> (element % 8) & 1) * 16.0;
    let element = |index: usize| match format {
        BlockFormat::Q4_0 => [half(bytes, 0) * (nibble(2, index) - 8.0), 0.0],
        BlockFormat::Q4_1 => [half(bytes, 0) * nibble(4, index), half(bytes, 2)],
        BlockFormat::Q8_0 => [half(bytes, 0) * f64::from(bytes[2 + index] as i8), 0.0],
        BlockFormat::Q5_0 => [half(bytes, 0) * (nibble(6, index) + fifth(2, index) - 16.0), 0.0],
        BlockFormat::Q5_1 => [half(bytes, 0) * (nibble(8, index) + fifth(4, index)), half(bytes, 2)],
        BlockFormat::Mxfp4 => {
            let bits = nibble(1, index) as u8;
            let values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
            let sign = if bits < 8 { 1.0 } else { -1.0 };
            [sign * values[usize::from(bits % 8)] * 2f64.powi(i32::from(bytes[0]) - 127), 0.0]
        }
        _ => large(format, bytes, index),
    };
    (0..format.elements()).map(element).collect()
}

/// Element `index` of a block of 256, as the product with its integer, and its minimum.
fn large(format: BlockFormat, bytes: &[u8], index: usize) -> [f64; 2] {
    let (h, j, l) = (index / 128, index / 32 % 4, index % 32);
    let part = index / 32;
    // Two or four bits of a byte.
    let pair = |first: usize| bytes[first + 32 * h + l] >> (2 * j) & 3;
    let halves = |byte: u8, high: bool| if high { byte >> 4 } else { byte & 15 };
    match format {
        BlockFormat::Q2_K => {
            let both = bytes[index / 16];
            let product = half(bytes, 80) * f64::from(both & 15) * f64::from(pair(16));
            [product, -half(bytes, 82) * f64::from(both >> 4)]
        }
        BlockFormat::Q3_K => {
            let (scales, number) = (&bytes[96..108], index / 16);
            let low = halves(scales[number % 8], number >= 8);
            let high = scales[8 + number % 4] >> (2 * (number / 4)) & 3;
            let scale = f64::from(low) + 16.0 * f64::from(high) - 32.0;
            let third = bytes[l] >> part & 1;
            [half(bytes, 108) * scale * (f64::from(pair(32)) + 4.0 * f64::from(third) - 4.0), 0.0]
        }
        BlockFormat::Q4_K | BlockFormat::Q5_K => {
            let packed = &bytes[4..16];
            let (scale, minimum) = if part < 4 {
                (packed[part] % 64, packed[part + 4] % 64)
            } else {
                let upper = |at: usize| packed[at] / 64 * 16;
                (
                    halves(packed[part + 4], false) + upper(part - 4),
                    halves(packed[part + 4], true) + upper(part),
                )
            };
            let (first, fifth) =
                if format == BlockFormat::Q5_K { (48, bytes[16 + l] >> part & 1) } else { (16, 0) };
            let q = halves(bytes[first + part / 2 * 32 + l], part % 2 == 1) + 16 * fifth;
            [half(bytes, 0) * f64::from(scale) * f64::from(q), -half(bytes, 2) * f64::from(minimum)]
        }
        BlockFormat::Q6_K => {
            let q = halves(bytes[64 * h + 32 * (j % 2) + l], j >= 2) + 16 * pair(128);
            [half(bytes, 208) * f64::from(bytes[192 + index / 16] as i8) * (f64::from(q) - 32.0), 0.0]
        }
        other => unreachable!("the suite makes no blocks of format {}", other.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_of(format: BlockFormat, bytes: &[u8]) -> Vec<f64> {
        decode(&WeightType { format: WeightFormat::Block(format), shape: vec![1, 32] }, bytes)
    }

    #[test]
    fn blocks_by_hand() {
        // f16: 0x3800 is 0.5, 0xBC00 is -1.
        let mut bytes = vec![0x00, 0x38];
        bytes.extend([0x9A; 16]);
        let values = block_of(BlockFormat::Q4_0, &bytes);
        assert_eq!((values[0], values[15], values[16], values[31]), (1.0, 1.0, 0.5, 0.5));

        let mut bytes = vec![0x00, 0x38, 0x00, 0xBC];
        bytes.extend([0x30; 16]);
        let values = block_of(BlockFormat::Q4_1, &bytes);
        assert_eq!((values[3], values[20]), (-1.0, 0.5));

        let mut bytes = vec![0x00, 0x38];
        bytes.extend((0..32).map(|index| (index - 16i8) as u8));
        let values = block_of(BlockFormat::Q8_0, &bytes);
        assert_eq!((values[0], values[16], values[31]), (-8.0, 0.0, 7.5));
    }

    #[test]
    fn rows_of_integers_by_hand() {
        let of = |name: &str, columns: usize, bytes: &[u8]| {
            let format = WeightFormat::from_name(name).unwrap();
            decode(&WeightType { format, shape: vec![1, columns] }, bytes)
        };
        // bf16: 0x3F00 is 0.5, 0xBF80 is -1.
        let mut bytes = vec![0; 32];
        bytes[..2].copy_from_slice(&[0x00, 0x3F]);
        bytes[16..19].copy_from_slice(&[3, 0xFF, 0x80]);
        assert_eq!(of("int8_bf16", 3, &bytes), [1.5, -0.5, -64.0]);
        bytes[2] = 4;
        assert_eq!(of("int8z_bf16", 3, &bytes), [-0.5, 125.5, 62.0]);
        bytes[2..4].copy_from_slice(&[0x80, 0xBF]);
        assert_eq!(of("int4g32m_bf16", 32, &bytes)[..4], [0.5, -1.0, 6.5, 6.5]);
        assert_eq!(of("int4g32_bf16", 32, &bytes)[..4], [-2.5, -4.0, 3.5, 3.5]);
    }

    /// The sums of blocks of random bytes, computed with `dequantize` of the Python package `gguf`.
    #[test]
    fn large_blocks_by_gguf() {
        let known = [
            (BlockFormat::Q5_0, 1, -27.5),
            (BlockFormat::Q5_1, 2, 237.0),
            (BlockFormat::Q2_K, 2, 1279.5),
            (BlockFormat::Q3_K, 1, 428.5),
            (BlockFormat::Q4_K, 2, 22047.5),
            (BlockFormat::Q5_K, 2, 47105.5),
            (BlockFormat::Q6_K, 1, -25880.5),
            (BlockFormat::Mxfp4, 0, -40.0),
        ];
        for (format, scales, sum) in known {
            let mut state = 1u32;
            let mut bytes: Vec<u8> = (0..format.bytes())
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) as u8
                })
                .collect();
            let first = match format {
                BlockFormat::Q2_K => 80,
                BlockFormat::Q3_K => 108,
                BlockFormat::Q6_K => 208,
                _ => 0,
            };
            // f16: 0x3800 is 0.5, 0x3400 is 0.25.
            bytes[first..first + 2 * scales].copy_from_slice(&[0x00, 0x38, 0x00, 0x34][..2 * scales]);
            if format == BlockFormat::Mxfp4 {
                bytes[0] = 130;
            }
            let weight_type =
                WeightType { format: WeightFormat::Block(format), shape: vec![1, format.elements()] };
            assert_eq!(decode(&weight_type, &bytes).iter().sum::<f64>(), sum, "{}", format.name());
        }
    }

    #[test]
    fn minima_are_terms_of_sums() {
        let format = WeightFormat::Block(BlockFormat::Q4_1);
        let mut bytes = vec![0x00, 0x38, 0x00, 0xBC];
        bytes.extend([0x30; 16]);
        let weight_type = WeightType { format, shape: vec![1, 32] };
        let of = |reals: Vec<Real>| (reals[20].value, reals[20].magnitude);
        assert_eq!(of(reals(&weight_type, &bytes)), (0.5, 0.5));
        assert_eq!(of(reals_in_parts(&weight_type, &bytes)), (0.5, 2.5));
    }

    #[test]
    fn dense_by_hand() {
        let weight_type = WeightType { format: WeightFormat::Dense(DType::BF16), shape: vec![1, 2] };
        assert_eq!(decode(&weight_type, &[0x80, 0x3F, 0x00, 0xC0]), [1.0, -2.0]);
    }
}
