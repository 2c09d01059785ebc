//! The block formats of GGUF files.

use super::Affine;

#[doc = include_str!("block.md")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
#[allow(non_camel_case_types, reason = "the names of GGUF")]
pub enum BlockFormat {
    /// 4 bits, minus 8.
    Q4_0 = 1,
    /// 4 bits, plus a minimum.
    Q4_1 = 2,
    /// 8 bits, signed.
    Q8_0 = 3,
    /// 5 bits, minus 16.
    Q5_0 = 4,
    /// 5 bits, plus a minimum.
    Q5_1 = 5,
    /// 2 bits, with a scale and a minimum for 16 elements.
    Q2_K = 6,
    /// 3 bits, with a scale for 16 elements.
    Q3_K = 7,
    /// 4 bits, with a scale and a minimum for 32 elements.
    Q4_K = 8,
    /// 5 bits, with a scale and a minimum for 32 elements.
    Q5_K = 9,
    /// 6 bits, with a scale for 16 elements.
    Q6_K = 10,
    /// 4-bit floats with a power of two for 32 elements.
    Mxfp4 = 11,
}

impl BlockFormat {
    /// The integer that MXFP4's rows are unpacked to for each 4-bit float (E2M1): twice its value, plus 12.
    pub const E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

    /// The definition of all formats, in Markdown.
    pub const DOCUMENTATION: &'static str = include_str!("block.md");

    /// Every block format, in the order of its number.
    pub const ALL: [Self; 11] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q8_0,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::Mxfp4,
    ];

    /// The number of elements of a block.
    pub const fn elements(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 | Self::Q5_0 | Self::Q5_1 | Self::Mxfp4 => 32,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// The number of bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q2_K => 84,
            Self::Q3_K => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
            Self::Mxfp4 => 17,
        }
    }

    /// The name that programs and messages use: that of GGUF in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q8_0 => "q8_0",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::Q2_K => "q2_k",
            Self::Q3_K => "q3_k",
            Self::Q4_K => "q4_k",
            Self::Q5_K => "q5_k",
            Self::Q6_K => "q6_k",
            Self::Mxfp4 => "mxfp4",
        }
    }

    /// The number of elements that share a scale.
    pub const fn group(self) -> usize {
        match self {
            Self::Q2_K | Self::Q3_K | Self::Q6_K => 16,
            _ => 32,
        }
    }

    /// Unpacks a block: `block` is [`Self::bytes`] long, `integers` [`Self::elements`], and `scales` has an item for each
    /// [`Self::group`] of elements. Scales are exact, and so are their products with integers.
    pub(super) fn unpack(self, block: &[u8], integers: &mut [u8], scales: &mut [Affine]) {
        let half = |at: usize| {
            block.get(at..at + 2).map_or(0.0, |b| half::f16::from_le_bytes([b[0], b[1]]).to_f32())
        };
        let mut set = |index: usize, scale: f32, zero: f32, minimum: f32| {
            if let Some(affine) = scales.get_mut(index) {
                *affine = Affine { scale, zero, minimum };
            }
        };
        match self {
            Self::Q8_0 => {
                set(0, half(0), 128.0, 0.0);
                // Flipping the sign bit of a signed byte adds 128.
                integers.iter_mut().zip(&block[2..]).for_each(|(q, byte)| *q = byte ^ 0x80);
            }
            Self::Q4_0 => {
                set(0, half(0), 8.0, 0.0);
                nibbles(&block[2..], 0, integers);
            }
            Self::Q4_1 => {
                set(0, half(0), 0.0, half(2));
                nibbles(&block[4..], 0, integers);
            }
            Self::Q5_0 => {
                set(0, half(0), 16.0, 0.0);
                nibbles(&block[6..], fifth_bits(&block[2..6]), integers);
            }
            Self::Q5_1 => {
                set(0, half(0), 0.0, half(2));
                nibbles(&block[8..], fifth_bits(&block[4..8]), integers);
            }
            Self::Q2_K => {
                for (index, both) in block[..16].iter().enumerate() {
                    set(index, half(80) * f32::from(both & 15), 0.0, -half(82) * f32::from(both >> 4));
                }
                by_parts(integers, |g, l| block[16 + 32 * (g / 4) + l] >> (2 * (g % 4)) & 3);
            }
            Self::Q3_K => {
                let packed = &block[96..108];
                for index in 0..16 {
                    let low = if index < 8 { packed[index] & 15 } else { packed[index - 8] >> 4 };
                    let scale = low | (packed[8 + index % 4] >> (2 * (index / 4)) & 3) << 4;
                    set(index, half(108) * (f32::from(scale) - 32.0), 4.0, 0.0);
                }
                by_parts(integers, |g, l| {
                    block[32 + 32 * (g / 4) + l] >> (2 * (g % 4)) & 3 | (block[l] >> g & 1) << 2
                });
            }
            Self::Q4_K | Self::Q5_K => {
                let (fifth, first) = if self == Self::Q5_K { (Some(&block[16..48]), 48) } else { (None, 16) };
                for index in 0..8 {
                    let (scale, minimum) = six_bit_factors(&block[4..16], index);
                    set(index, half(0) * f32::from(scale), 0.0, -half(2) * f32::from(minimum));
                }
                by_parts(integers, |g, l| {
                    let low = block[first + 32 * (g / 2) + l] >> (4 * (g % 2)) & 15;
                    low | fifth.map_or(0, |bits| (bits[l] >> g & 1) << 4)
                });
            }
            Self::Mxfp4 => {
                set(0, half_power_of_two(block[0]), 12.0, 0.0);
                nibbles(&block[1..], 0, integers);
                integers.iter_mut().for_each(|q| *q = Self::E2M1[usize::from(*q & 15)]);
            }
            Self::Q6_K => {
                for (index, scale) in block[192..208].iter().enumerate() {
                    set(index, half(208) * f32::from(*scale as i8), 32.0, 0.0);
                }
                by_parts(integers, |g, l| {
                    let (h, j) = (g / 4, g % 4);
                    let low = block[64 * h + 32 * (j % 2) + l] >> (4 * (j / 2)) & 15;
                    low | (block[128 + 32 * h + l] >> (2 * j) & 3) << 4
                });
            }
        }
    }
}

/// Half the power of two that an 8-bit exponent stands for, exactly; NaN for 255.
fn half_power_of_two(exponent: u8) -> f32 {
    match exponent {
        255 => f32::NAN,
        // Below the smallest normal number.
        0 | 1 => f32::from_bits(1 << (21 + exponent)),
        _ => f32::from_bits(u32::from(exponent - 1) << 23),
    }
}

/// Unpacks the integers of a block of 32: 16 bytes of nibbles with a fifth bit each.
fn nibbles(bytes: &[u8], fifth: u32, integers: &mut [u8]) {
    let (low, high) = integers.split_at_mut(16);
    for (index, ((byte, low), high)) in bytes.iter().zip(low).zip(high).enumerate() {
        let bit = |index: usize| (fifth >> index & 1) as u8 * 16;
        *low = byte & 15 | bit(index);
        *high = byte >> 4 | bit(index + 16);
    }
}

fn fifth_bits(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte))
}

/// Unpacks the integers of a block of 256, in parts of 32.
fn by_parts(integers: &mut [u8], integer: impl Fn(usize, usize) -> u8) {
    for (part, integers) in integers.chunks_exact_mut(32).enumerate() {
        for (index, q) in integers.iter_mut().enumerate() {
            *q = integer(part, index);
        }
    }
}

/// The factors of 6 bits, of the scale and of the minimum, of part `part` of a block, from the 12 bytes of `q4_k` and `q5_k`.
///
/// # Panics
/// If there are fewer bytes, or eight parts or more are asked for.
pub fn six_bit_factors(packed: &[u8], part: usize) -> (u8, u8) {
    if part < 4 {
        return (packed[part] & 63, packed[part + 4] & 63);
    }
    let both = packed[part + 4];
    (both & 15 | packed[part - 4] >> 6 << 4, both >> 4 | packed[part] >> 6 << 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WeightFormat;

    fn f16(value: f32) -> [u8; 2] {
        half::f16::from_f32(value).to_le_bytes()
    }

    fn decoded(format: BlockFormat, block: &[u8]) -> Vec<f32> {
        let mut out = vec![f32::NAN; format.elements()];
        WeightFormat::Block(format).decode_row(block, &mut out).unwrap();
        out
    }

    #[test]
    fn blocks_of_32_decode_by_their_formula() {
        let mut block = vec![0u8; 20];
        block[..2].copy_from_slice(&f16(0.5));
        block[2..4].copy_from_slice(&f16(-1.0));
        block[4] = 0xF3; // element 0 is 3, element 16 is 15
        let out = decoded(BlockFormat::Q4_1, &block);
        assert_eq!((out[0], out[16], out[1]), (0.5, 6.5, -1.0));

        let mut block = vec![0u8; 34];
        block[..2].copy_from_slice(&f16(2.0));
        block[33] = 0x80;
        let out = decoded(BlockFormat::Q8_0, &block);
        assert_eq!((out[0], out[31]), (0.0, -256.0));

        let mut block = vec![0x88u8; 18];
        block[..2].copy_from_slice(&f16(2.0));
        block[2] = 0x0F;
        let out = decoded(BlockFormat::Q4_0, &block);
        assert_eq!((out[0], out[16], out[5]), (14.0, -16.0, 0.0));

        let mut block = vec![0u8; 24];
        block[..2].copy_from_slice(&f16(0.5));
        block[2..4].copy_from_slice(&f16(1.0));
        block[4..8].copy_from_slice(&(1u32 << 1 | 1 << 31).to_le_bytes());
        block[9] = 0x52; // element 1 is 2 + 16, element 17 is 5
        let out = decoded(BlockFormat::Q5_1, &block);
        assert_eq!((out[1], out[17], out[31], out[0]), (10.0, 3.5, 9.0, 1.0));
        block.drain(2..4);
        let out = decoded(BlockFormat::Q5_0, &block);
        assert_eq!((out[1], out[17], out[31], out[0]), (1.0, -5.5, 0.0, -8.0));
    }

    #[test]
    fn every_exponent_of_mxfp4_is_a_power_of_two() {
        for exponent in 0..=255u8 {
            // The nibbles of 1 and of -6.
            let mut block = vec![0xF2; 17];
            block[0] = exponent;
            let out = decoded(BlockFormat::Mxfp4, &block);
            let expected = 2f64.powi(i32::from(exponent) - 127);
            match exponent {
                255 => assert!(out.iter().all(|element| element.is_nan())),
                _ => assert_eq!(
                    (f64::from(out[0]), f64::from(out[16])),
                    (expected, (-6.0 * expected) as f32 as f64)
                ),
            }
        }
    }

    /// The elements 0, 100 (modulo 32 in small blocks) and last, and the sum of all, of a random block of each format, as
    /// `dequantize` of the Python package `gguf` 0.19 computes them.
    const BY_GGUF: [(BlockFormat, f32, f32, f32, f32); 11] = [
        (BlockFormat::Q4_0, -3.5, -1.0, -1.5, -6.5),
        (BlockFormat::Q4_1, 6.25, 2.25, 4.25, 137.5),
        (BlockFormat::Q8_0, -63.5, -29.0, -2.5, -97.5),
        (BlockFormat::Q5_0, 3.0, -8.0, -7.5, -27.5),
        (BlockFormat::Q5_1, 2.25, 3.75, 10.75, 237.0),
        (BlockFormat::Q2_K, -0.75, -3.0, 7.25, 1279.5),
        (BlockFormat::Q3_K, 10.5, 0.0, 54.0, 428.5),
        (BlockFormat::Q4_K, 71.0, 94.0, 185.75, 22047.5),
        (BlockFormat::Q5_K, 41.0, 31.0, 99.75, 47105.5),
        (BlockFormat::Q6_K, -574.0, 1312.5, -0.0, -25880.5),
        (BlockFormat::Mxfp4, -32.0, -32.0, -24.0, -40.0),
    ];

    #[test]
    fn every_format_decodes_as_the_gguf_package_does() {
        for (format, first_element, element_100, last_element, sum) in BY_GGUF {
            let mut state = 1u32;
            let mut bytes: Vec<u8> = (0..format.bytes())
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) as u8
                })
                .collect();
            let scales: &[usize] = match format {
                BlockFormat::Q2_K => &[80, 82],
                BlockFormat::Q3_K => &[108],
                BlockFormat::Q6_K => &[208],
                BlockFormat::Q8_0 | BlockFormat::Q4_0 | BlockFormat::Q5_0 => &[0],
                BlockFormat::Mxfp4 => &[],
                _ => &[0, 2],
            };
            for (at, scale) in scales.iter().zip([0.5, 0.25]) {
                bytes[*at..at + 2].copy_from_slice(&f16(scale));
            }
            if format == BlockFormat::Mxfp4 {
                bytes[0] = 130;
            }
            let out = decoded(format, &bytes);
            let last = format.elements() - 1;
            let found = (out[0], out[100 % format.elements()], out[last], out.iter().sum::<f32>());
            assert_eq!(found, (first_element, element_100, last_element, sum), "{format:?}");
        }
    }
}
