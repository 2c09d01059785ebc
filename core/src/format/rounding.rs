//! Rounding of f32 to shorter floats without branches and calls, so that loops vectorise.

/// The magnitude below which f16 is subnormal.
const F16_NORMAL: f32 = 1.0 / (1 << 14) as f32;

/// The first magnitude beyond the exponents of f16.
const F16_END: f32 = 65536.0;

/// A number rounded to f16, to nearest, ties to even. NaN stays NaN.
#[inline(always)]
pub(super) fn round_to_f16(value: f32) -> f32 {
    let magnitude = value.abs();
    // The f32 from 0.5 to 1 are as far apart as subnormal f16.
    let subnormal = (magnitude + 0.5) - 0.5;
    let normal = without_bits(magnitude, 13);
    let normal = if normal >= F16_END { f32::INFINITY } else { normal };
    (if magnitude < F16_NORMAL { subnormal } else { normal }).copysign(value)
}

/// A number rounded to bf16, to nearest, ties to even. NaN stays NaN.
#[inline(always)]
pub(super) fn round_to_bf16(value: f32) -> f32 {
    without_bits(value, 16)
}

/// A number without the last bits of its mantissa, rounded to nearest, ties to even. NaN stays NaN.
#[inline(always)]
fn without_bits(value: f32, bits: u32) -> f32 {
    let below = (1 << bits) - 1;
    let word = value.to_bits();
    let rounded = word.wrapping_add(below / 2 + (word >> bits & 1)) & !below;
    // The bits of NaN could carry into the sign.
    if value.is_nan() { value } else { f32::from_bits(rounded) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn numbers_around_every_short_float_and_every_midpoint_round_as_in_half() {
        let same = |value: f32| {
            for value in [value, -value] {
                let found = (round_to_f16(value), round_to_bf16(value));
                let expected = (f16::from_f32(value).to_f32(), bf16::from_f32(value).to_f32());
                let same = |found: f32, expected: f32| {
                    found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan()
                };
                assert!(same(found.0, expected.0) && same(found.1, expected.1), "{value:e}: {found:?}");
            }
        };
        for bits in 0..0x8000 {
            for short in [f16::from_bits(bits).to_f32(), bf16::from_bits(bits).to_f32()] {
                for middle in [0, 1 << 12, 1 << 15] {
                    (-1i32..=1).for_each(|near| {
                        same(f32::from_bits(
                            short.to_bits().wrapping_add_signed(middle + near) & 0x7FFF_FFFF,
                        ));
                    });
                }
            }
        }
        // Midpoints of subnormal f16.
        (0..2048).for_each(|half_steps| same(half_steps as f32 * 2f32.powi(-25)));
    }
}
