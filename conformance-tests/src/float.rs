//! Rounding to storage types, by the rules of IEEE 754, in f64 arithmetic.

use dsrun_core::DType;
use half::{bf16, f16};

/// Precision in bits, including the hidden bit; the smallest normal exponent; and the largest finite value.
fn format(dtype: DType) -> (i32, i32, f64) {
    match dtype {
        DType::F16 => (11, -14, 65504.0),
        DType::BF16 => (8, -126, f64::from(f32::from_bits(0x7F7F_0000))),
        _ => (24, -126, f64::from(f32::MAX)),
    }
}

/// The unit roundoff: the largest relative error of rounding to nearest.
pub fn unit(dtype: DType) -> f64 {
    2f64.powi(-format(dtype).0)
}

/// The largest finite value.
pub fn largest(dtype: DType) -> f64 {
    format(dtype).2
}

/// The smallest positive normal value.
pub fn smallest_normal(dtype: DType) -> f64 {
    2f64.powi(format(dtype).1)
}

/// The distance between subnormal values.
pub fn subnormal_step(dtype: DType) -> f64 {
    let (precision, exponent, _) = format(dtype);
    2f64.powi(exponent - precision + 1)
}

/// 2 to a power that makes it a normal number.
fn power_of_two(exponent: i32) -> f64 {
    debug_assert!((-1022..=1023).contains(&exponent), "2^{exponent} is not normal");
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The nearest value of a float type, ties to even; infinite beyond its range.
pub fn round(dtype: DType, value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let (precision, smallest, largest) = format(dtype);
    let exponent = ((value.to_bits() >> 52) & 0x7FF) as i32 - 1023;
    let step = exponent.max(smallest) - (precision - 1);
    // A number of steps is below 2^25, so behind this sum no bits are left for fractions: it is rounded, ties to even. Libraries'
    // functions for both take several times as long, and the suite rounds every number that it draws.
    const WHOLE: f64 = (3u64 << 51) as f64;
    let steps = value * power_of_two(-step) + WHOLE - WHOLE;
    let rounded = (steps * power_of_two(step)).copysign(value);
    if rounded.abs() > largest { f64::INFINITY.copysign(value) } else { rounded }
}

/// The bits of the nearest value of a float type.
pub fn bits(dtype: DType, value: f64) -> u32 {
    let rounded = round(dtype, value);
    match dtype {
        DType::F16 => u32::from(f16::from_f64(rounded).to_bits()),
        DType::BF16 => u32::from(bf16::from_f64(rounded).to_bits()),
        _ => (rounded as f32).to_bits(),
    }
}

/// The value of an element, given its bits.
pub fn value(dtype: DType, bits: u32) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::from_bits(bits)),
        DType::F16 => f16::from_bits(bits as u16).to_f64(),
        DType::BF16 => bf16::from_bits(bits as u16).to_f64(),
        DType::I32 => f64::from(bits as i32),
        DType::I8 => f64::from(bits as u8 as i8),
        _ => f64::from(bits),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::tie_to_even_below(DType::F16, 1.0 + 2f64.powi(-11), 1.0)]
    #[case::tie_to_even_above(DType::F16, 1.0 + 3.0 * 2f64.powi(-11), 1.0 + 2f64.powi(-9))]
    #[case::beyond_the_tie(DType::F16, 1.0 + 1.01 * 2f64.powi(-11), 1.0 + 2f64.powi(-10))]
    #[case::largest(DType::F16, 65519.9, 65504.0)]
    #[case::overflow(DType::F16, 65520.0, f64::INFINITY)]
    #[case::negative_overflow(DType::F16, -1e9, f64::NEG_INFINITY)]
    #[case::subnormal(DType::F16, 2.6 * 2f64.powi(-24), 3.0 * 2f64.powi(-24))]
    #[case::underflow(DType::F16, 2f64.powi(-25), 0.0)]
    #[case::bf16(DType::BF16, std::f64::consts::PI, 3.140625)]
    #[case::f32(DType::F32, 0.1, 13_421_773.0 / 134_217_728.0)]
    fn known_roundings(#[case] dtype: DType, #[case] from: f64, #[case] to: f64) {
        assert_eq!(round(dtype, from), to);
    }

    #[test]
    fn agrees_with_the_hardware_on_f32() {
        let mut state = 1u64;
        for _ in 0..10_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let value = f64::from_bits((state & !(0x7FF << 52)) | ((873 + (state >> 55)) << 52));
            assert_eq!(round(DType::F32, value), f64::from(value as f32), "{value:e}");
        }
    }

    #[test]
    fn every_16_bit_pattern_reads_back() {
        for dtype in [DType::F16, DType::BF16] {
            for pattern in 0..=u16::MAX {
                let number = value(dtype, pattern.into());
                assert!(number.is_nan() || bits(dtype, number) == u32::from(pattern), "{dtype} {pattern:x}");
            }
        }
    }
}
