//! Error propagation through a chain of ops.
//!
//! The oracle of a region is composed of those of its primitives. Intermediate values have errors, which the next op
//! propagates: [`Real::magnitude`] stands for errors of f32 arithmetic, [`Real::inner`] and [`Real::spread`] for roundings to a
//! storage type. Each is multiplied by the derivative of the result with respect to the operand.

use super::{Real, activation, rope as one_rope};
use dsrun_core::op::{Nonlinearity, RopePairing};

/// The largest derivative of all non-linear functions: that of the GELUs, near 1.5.
const SLOPE: f64 = 1.13;

/// An intermediate value that may be rounded to a storage type.
pub fn stored(real: Real) -> Real {
    real.rounded_inside(real.inner + real.value.abs(), real.spread.hypot(real.value))
}

/// The exact value of an operand.
pub fn exact(value: f64) -> Real {
    Real::new(value, value.abs())
}

/// `linear` of one row. The decoded elements of a quantised weight may be rounded.
pub fn linear(x: &[Real], weight: &[f64], bias: Option<&[f64]>, quantised: bool) -> Vec<Real> {
    let again = if quantised { 1.0 } else { 0.0 };
    let one = |(index, weights): (usize, &[f64])| {
        let bias = bias.map_or(0.0, |bias| bias[index]);
        let (mut sum, mut squares) = (Real::sum(bias, bias.abs(), x.len() + 1), 0.0);
        for (x, weight) in x.iter().zip(weights) {
            sum.value += x.value * weight;
            sum.magnitude += x.magnitude * weight.abs();
            sum.inner += (x.inner + again * x.value.abs()) * weight.abs();
            squares += (x.spread * x.spread + again * x.value * x.value) * weight * weight;
        }
        Real { spread: squares.sqrt(), ..sum }
    };
    weight.chunks(x.len().max(1)).enumerate().map(one).collect()
}

/// `rms_norm` of one group.
///
/// With `f = rsqrt(mean(x^2) + eps)`, an error `e` of `x` changes `y = x f w` directly by `e f w`, and through `f` by
/// `y f^2 / n * sum(x e)`.
pub fn rms_norm(x: &[Real], weight: &[f64], eps: f64, offset: f64) -> Vec<Real> {
    let count = x.len() as f64;
    let factor = 1.0 / (x.iter().map(|x| x.value * x.value).sum::<f64>() / count + eps).sqrt();
    let moved = |error: fn(&Real) -> f64| x.iter().map(|x| x.value.abs() * error(x)).sum::<f64>();
    let (magnitude, inner) = (moved(|x| x.magnitude), moved(|x| x.inner));
    let spread = x.iter().map(|x| (x.value * x.spread).powi(2)).sum::<f64>().sqrt();
    let through = factor * factor / count;
    let one = |(x, weight): (&Real, &f64)| {
        let value = x.value * factor * (weight + offset);
        let (direct, through) = (factor * (weight.abs() + offset.abs()), value.abs() * through);
        Real {
            value,
            magnitude: direct * x.magnitude + through * magnitude,
            inner: direct * x.inner + through * inner,
            spread: (direct * x.spread).hypot(through * spread),
            terms: count as usize,
            ..Real::default()
        }
    };
    x.iter().zip(weight).map(one).collect()
}

/// `rope` of one head at one position; elements that are not rotated keep their value.
pub fn rope(
    head: &[Real],
    position: i32,
    frequencies: &[f64],
    pairing: RopePairing,
    scale: f64,
) -> Vec<Real> {
    let rotate = |part: fn(&Real) -> f64| {
        let parts: Vec<f64> = head.iter().map(part).collect();
        one_rope::rope(&parts, position, frequencies, pairing, scale)
    };
    // The errors of both elements of a pair add up in each.
    let (values, magnitudes) = (rotate(|real| real.value), rotate(|real| real.magnitude));
    let (inners, spreads) = (rotate(|real| real.inner), rotate(|real| real.spread));
    let one = |(index, real): (usize, &Real)| match (values[index], magnitudes[index]) {
        (Some(value), Some(magnitude)) => Real {
            value: value.value,
            magnitude: magnitude.magnitude,
            inner: inners[index].map_or(0.0, |inner| inner.magnitude),
            spread: spreads[index].map_or(0.0, |spread| spread.magnitude),
            terms: real.terms,
            ..Real::default()
        },
        _ => *real,
    };
    head.iter().enumerate().map(one).collect()
}

/// `activation` without a bias.
pub fn activation(function: Nonlinearity, limit: f64, x: Real) -> Real {
    let value = activation::activation(function, limit, x.value, 0.0).value;
    Real { value, ..scaled(x, SLOPE) }
}

/// `gated_activation` without a bias.
pub fn gated(function: Nonlinearity, limit: f64, gate: Real, up: Real) -> Real {
    let activated = activation(function, limit, gate);
    let product = activation::gated(function, limit, 0.0, [gate.value, 0.0], [up.value, 0.0]);
    let (by_gate, by_up) = (scaled(activated, up.value.abs()), scaled(up, activated.value.abs()));
    Real {
        value: product.value,
        magnitude: product.magnitude + by_gate.magnitude + by_up.magnitude,
        inner: by_gate.inner + by_up.inner,
        spread: by_gate.spread.hypot(by_up.spread),
        terms: gate.terms.max(up.terms),
        ..product
    }
}

/// `a + alpha * b`.
pub fn add(a: f64, b: Real, alpha: f64) -> Real {
    let b = scaled(b, alpha.abs());
    let value = a + alpha.signum() * b.value;
    Real { value, magnitude: a.abs() + b.magnitude, ..b }
}

/// The sum of two values, each with its errors.
pub fn sum(a: Real, b: Real) -> Real {
    Real {
        value: a.value + b.value,
        magnitude: a.magnitude + b.magnitude,
        inner: a.inner + b.inner,
        spread: a.spread.hypot(b.spread),
        terms: a.terms + b.terms,
        partial: a.partial.max(b.partial),
        gain: a.gain.max(b.gain),
    }
}

/// A value and its errors, multiplied by a factor that is not negative.
fn scaled(real: Real, factor: f64) -> Real {
    Real {
        value: real.value * factor,
        magnitude: real.magnitude * factor,
        inner: real.inner * factor,
        spread: real.spread * factor,
        terms: real.terms,
        partial: real.partial * factor,
        gain: real.gain.max(1.0) * factor,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::{linear as plain_linear, norm};

    /// A value with an f32 error, an inner rounding and a spread.
    fn real(value: f64) -> Real {
        Real { value, magnitude: 2.0 * value.abs(), inner: 3.0, spread: 0.5, terms: 4, ..Real::default() }
    }

    #[test]
    fn values_are_those_of_the_primitives() {
        let x = [3.0, -4.0, 0.5, 1.0];
        let (reals, weight): (Vec<Real>, Vec<f64>) = (x.map(real).into(), (0..8).map(f64::from).collect());
        let values = |reals: Vec<Real>| reals.iter().map(|real| real.value).collect::<Vec<_>>();
        assert_eq!(
            values(linear(&reals, &weight, Some(&[1.0, -1.0]), false)),
            values(plain_linear::linear(&x, &weight, Some(&[1.0, -1.0]), [1, 2, 4]))
        );
        assert_eq!(
            values(rms_norm(&reals, &weight[..4], 0.1, 1.0)),
            values(norm::rms_norm(&x, &weight[..4], 0.1, 1.0))
        );
        let rotated = one_rope::rope(&x, 7, &[0.3], RopePairing::Neighbours, 2.0);
        let expected: Vec<f64> =
            rotated.iter().zip(x).map(|(rotated, x)| rotated.map_or(x, |rotated| rotated.value)).collect();
        assert_eq!(values(rope(&reals, 7, &[0.3], RopePairing::Neighbours, 2.0)), expected);
        assert_eq!(add(1.0, real(3.0), -0.5).value, -0.5);
        let product = gated(Nonlinearity::Silu, 0.0, real(1.5), real(-2.0)).value;
        assert_eq!(product, activation::gated(Nonlinearity::Silu, 0.0, 0.0, [1.5, 0.0], [-2.0, 0.0]).value);
    }

    /// Changing every operand by its error changes the result by no more than the propagated error.
    #[test]
    fn errors_are_carried_on() {
        let (step, weight) = (1e-6, [0.5, -2.0, 1.0, 3.0]);
        let reals: Vec<Real> = [3.0, -4.0, 0.5, 1.0].map(|value| real(value).rounded_inside(1.0, 1.0)).into();
        let moved = |signs: usize| -> Vec<Real> {
            let sign = |index: usize| if signs >> index & 1 == 1 { step } else { -step };
            reals
                .iter()
                .enumerate()
                .map(|(at, real)| Real { value: real.value + sign(at), ..*real })
                .collect()
        };
        type Op<'a> = Box<dyn Fn(&[Real]) -> Vec<Real> + 'a>;
        let ops: [Op<'_>; 5] = [
            Box::new(|x| linear(x, &weight, None, false)),
            Box::new(|x| rms_norm(x, &weight, 0.1, 0.0)),
            Box::new(|x| rope(x, 7, &[0.3, 0.1], RopePairing::Halves, 1.5)),
            Box::new(|x| x.iter().map(|x| activation(Nonlinearity::GeluTanh, 0.0, *x)).collect()),
            Box::new(|x| vec![gated(Nonlinearity::GeluErf, 0.0, x[0], x[1]), add(1.0, x[2], -3.0)]),
        ];
        for (number, op) in ops.iter().enumerate() {
            let still = op(&reals);
            let mut most = vec![0.0f64; still.len()];
            for signs in 0..16 {
                for ((most, still), moved) in most.iter_mut().zip(&still).zip(op(&moved(signs))) {
                    *most = most.max((moved.value - still.value).abs());
                }
            }
            for (most, still) in most.iter().zip(&still) {
                let bound = still.inner * step;
                assert!(*most <= bound * 1.001, "op {number}: {most} is more than {bound}");
                assert!(bound <= 4.0 * most.max(step), "op {number}: {bound} says nothing about {most}");
            }
        }
    }
}
