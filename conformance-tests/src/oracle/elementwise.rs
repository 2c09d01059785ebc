//! Oracle of `add` and `cast`.

use super::{Real, float};
use dsrun_core::DType;

/// `a + alpha * (b + bias) + c`, one element.
pub fn add(a: f64, b: f64, c: f64, bias: f64, alpha: f64) -> Real {
    let value = a + alpha * (b + bias) + c;
    Real::sum(value, a.abs() + alpha.abs() * (b.abs() + bias.abs()) + c.abs(), 4)
}

/// The bits of an element in another float type; `None` for NaN, whose bits are not defined.
pub fn cast(from: DType, bits: u32, to: DType) -> Option<u32> {
    if from == to {
        return Some(bits);
    }
    let value = float::value(from, bits);
    (!value.is_nan()).then(|| float::bits(to, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn add_by_hand() {
        let real = add(1.0, 2.0, -0.5, 4.0, -3.0);
        assert_eq!((real.value, real.magnitude), (-17.5, 19.5));
    }

    #[test]
    fn cast_by_hand() {
        assert_eq!(cast(DType::F32, 1.0f32.to_bits(), DType::F16), Some(0x3C00));
        assert_eq!(cast(DType::F32, 1e6f32.to_bits(), DType::F16), Some(0x7C00));
        assert_eq!(cast(DType::F16, 0xC000, DType::BF16), Some(0xC000));
        assert_eq!(cast(DType::F16, 0x7E01, DType::F16), Some(0x7E01));
        assert_eq!(cast(DType::F16, 0x7E01, DType::F32), None);
    }
}
