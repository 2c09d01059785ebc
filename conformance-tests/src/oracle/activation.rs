//! Oracle of `activation` and `gated_activation`.

use super::Real;
use dsrun_core::op::Nonlinearity;

/// The error function, by the series `erf(x) = 2 / sqrt(pi) * exp(-x^2) * sum_n 2^n x^(2n+1) / (2n+1)!!`, whose terms all
/// have the same sign and never cancel.
pub fn erf(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x.abs() > 6.5 {
        return 1f64.copysign(x);
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > sum.abs() * 1e-18 {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

/// A non-linear function.
pub fn apply(function: Nonlinearity, x: f64) -> f64 {
    match function {
        Nonlinearity::Relu if x.is_nan() => x,
        Nonlinearity::Relu => x.max(0.0),
        Nonlinearity::Silu => x / (1.0 + (-x).exp()),
        Nonlinearity::GeluErf => x / 2.0 * (1.0 + erf(x / 2f64.sqrt())),
        Nonlinearity::GeluTanh => {
            x / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
        }
        Nonlinearity::QuickGelu => x / (1.0 + (-1.702 * x).exp()),
        Nonlinearity::Tanh => x.tanh(),
    }
}

/// The minimum of two numbers, which is NaN if one of them is, unlike `f64::min`.
fn at_most(x: f64, limit: f64) -> f64 {
    if x.is_nan() || limit == 0.0 { x } else { x.min(limit) }
}

/// The exponent of a sigmoid that is below the smallest normal f32, over the unit of the gates, 8 f32 roundings.
const FLUSHED: f64 = -126.0 + 21.0;

/// `f(min(x + bias, limit))`.
///
/// The magnitude of most functions is that of the sum and not of the value: with a bias the sum is rounded before `f` is applied,
/// and in the lower tail of the GELUs `1 + erf` cancels, which leaves an error proportional to `x`.
///
/// Nothing cancels in `x / (1 + exp(-c x))`, whose lower tail is `x exp(c x)`. With `s` the sum, its errors are the rounding of `s`
/// times the slope of `f`, and a share of the value: a few roundings, and that of the exponential's argument `c s`, which the
/// exponential turns into a relative error. A sigmoid below the smallest normal f32 may be flushed, or the exponential in it
/// may have overflowed, both from `s` of about -87 on. Then the result is zero, and off by up to `s` times that number: more than
/// the gate allows for a result that is flushed itself.
pub fn activation(function: Nonlinearity, limit: f64, x: f64, bias: f64) -> Real {
    let (sum, size) = (at_most(x + bias, limit), x.abs() + bias.abs());
    let value = apply(function, sum);
    let factor = match function {
        Nonlinearity::Silu => 1.0,
        Nonlinearity::QuickGelu => 1.702,
        _ => return Real::new(value, size),
    };
    let sigmoid = 1.0 / (1.0 + (-factor * sum).exp());
    let slope = sigmoid * (1.0 + factor * sum * (1.0 - sigmoid));
    let share = value.abs() * (1.0 + factor * sum.abs() * (1.0 - sigmoid));
    let magnitude = (slope.abs() * size).max(share) + sum.abs() * FLUSHED.exp2();
    Real::new(value, magnitude.min(size))
}

/// `f(min(gate + gate_bias, limit)) * (clamp(up + up_bias, -limit, limit) + up_offset)`.
pub fn gated(function: Nonlinearity, limit: f64, up_offset: f64, gate: [f64; 2], up: [f64; 2]) -> Real {
    let other = at_most(up[0] + up[1], limit);
    let other = if limit == 0.0 || other.is_nan() { other } else { other.max(-limit) };
    let gated = activation(function, limit, gate[0], gate[1]);
    let magnitude = gated.magnitude * (up[0].abs() + up[1].abs() + up_offset.abs());
    let factor = other + up_offset;
    Real::new(gated.value * factor, magnitude).multiplied(factor.abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    // Values from tables of the error function.
    #[rstest]
    #[case(0.0, 0.0)]
    #[case(0.5, 0.520_499_877_813_046_5)]
    #[case(1.0, 0.842_700_792_949_714_9)]
    #[case(-2.0, -0.995_322_265_018_952_7)]
    #[case(3.5, 0.999_999_256_901_627_7)]
    #[case(7.0, 1.0)]
    fn erf_of_known_points(#[case] x: f64, #[case] expected: f64) {
        assert!((erf(x) - expected).abs() < 4e-15, "{}", erf(x));
    }

    #[rstest]
    #[case(Nonlinearity::Relu, -2.0, 0.0)]
    #[case(Nonlinearity::Relu, 2.0, 2.0)]
    #[case(Nonlinearity::Silu, 1.0, 0.731_058_578_630_004_9)] // 1 / (1 + 1/e)
    #[case(Nonlinearity::Silu, -1.0, -0.268_941_421_369_995_1)]
    #[case(Nonlinearity::GeluErf, 1.0, 0.841_344_746_068_542_9)] // the normal distribution at 1
    #[case(Nonlinearity::GeluErf, -1.0, -0.158_655_253_931_457_1)]
    #[case(Nonlinearity::GeluTanh, 1.0, 0.841_191_990_608_276_6)]
    #[case(Nonlinearity::QuickGelu, 1.0, 0.845_795_765_742_6)] // 1 / (1 + exp(-1.702))
    #[case(Nonlinearity::Tanh, 1.0, 0.761_594_155_955_764_9)] // (e^2 - 1) / (e^2 + 1)
    #[case(Nonlinearity::Tanh, -40.0, -1.0)]
    fn functions_at_known_points(#[case] function: Nonlinearity, #[case] x: f64, #[case] expected: f64) {
        assert!((apply(function, x) - expected).abs() < 1e-9, "{}", apply(function, x));
    }

    #[test]
    fn limits_bound_the_gate_above_and_the_other_half_on_both_sides() {
        assert_eq!(activation(Nonlinearity::Relu, 3.0, 5.0, 1.0).value, 3.0);
        assert_eq!(activation(Nonlinearity::Relu, 0.0, 5.0, 1.0).value, 6.0);
        assert_eq!(gated(Nonlinearity::Relu, 3.0, 0.0, [5.0, 0.0], [-9.0, 1.0]).value, -9.0);
        assert_eq!(gated(Nonlinearity::Relu, 0.0, 0.0, [5.0, 0.0], [-9.0, 1.0]).value, -40.0);
        // The offset is added after the bound.
        assert_eq!(gated(Nonlinearity::Relu, 3.0, 1.0, [5.0, 0.0], [9.0, 1.0]).value, 12.0);
        assert!(gated(Nonlinearity::Silu, 1.0, 0.0, [f64::NAN, 0.0], [1.0, 0.0]).value.is_nan());
    }
}
