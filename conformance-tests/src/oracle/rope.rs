//! Oracle of `rope`.

use super::{Real, float};
use dsrun_core::{DType, op::RopePairing};

/// Rotates one head at one position. `None` marks elements that are copied.
///
/// By definition the angle is a product rounded to f32, so the oracle takes sine and cosine of the rounded product. At position
/// 100,000 the rounding changes the angle by up to 0.004, far more than the gates allow. Sine and cosine have an absolute error
/// of an f32 rounding of 1, which is why the magnitude includes both elements in full.
pub fn rope(
    head: &[f64],
    position: i32,
    frequencies: &[f64],
    pairing: RopePairing,
    scale: f64,
) -> Vec<Option<Real>> {
    let mut rotated = vec![None; head.len()];
    for (pair, frequency) in frequencies.iter().enumerate() {
        let (first, second) = match pairing {
            RopePairing::Halves => (pair, pair + frequencies.len()),
            RopePairing::Neighbours => (2 * pair, 2 * pair + 1),
        };
        let (sine, cosine) = float::round(DType::F32, f64::from(position) * frequency).sin_cos();
        let (p, q) = (head[first], head[second]);
        let magnitude = scale.abs() * (p.abs() + q.abs());
        rotated[first] = Some(Real::sum(scale * (p * cosine - q * sine), magnitude, 2));
        rotated[second] = Some(Real::sum(scale * (q * cosine + p * sine), magnitude, 2));
    }
    rotated
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::FRAC_PI_2;

    fn values(rotated: &[Option<Real>]) -> Vec<Option<f64>> {
        let near = |real: Real| (real.value * 1e6).round() / 1e6;
        rotated.iter().map(|real| real.map(near)).collect()
    }

    #[test]
    fn quarter_turns_by_hand() {
        let (head, frequencies) = ([1.0, 2.0, 3.0, 4.0, 5.0], [0.0, FRAC_PI_2]);
        // Pair 0 is not rotated, and pair 1 is by a quarter turn: (p, q) becomes (-q, p). All elements are doubled.
        let halves = rope(&head, 1, &frequencies, RopePairing::Halves, 2.0);
        assert_eq!(values(&halves), [Some(2.0), Some(-8.0), Some(6.0), Some(4.0), None]);
        let neighbours = rope(&head, 1, &frequencies, RopePairing::Neighbours, 2.0);
        assert_eq!(values(&neighbours), [Some(2.0), Some(4.0), Some(-8.0), Some(6.0), None]);
    }

    #[test]
    fn the_angle_is_rounded_to_f32() {
        let frequency = float::round(DType::F32, 0.1);
        let rotated = rope(&[1.0, 0.0], 123_457, &[frequency], RopePairing::Halves, 1.0);
        let angle = 123_457f32 * 0.1f32;
        assert_eq!(rotated[0].map(|real| real.value), Some(f64::from(angle).cos()));
    }
}
