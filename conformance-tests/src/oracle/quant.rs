//! Oracle of `quant_per_token`, `quant_per_group`, `linear_w8a8` and `linear_a8`.

use super::{Real, float};
use crate::gate::Gate;
use dsrun_core::DType;

/// The scale and the integers of a row, or of a group of one. Dividing two f32 numbers in f64 and rounding to f32 equals division in f32, because 53
/// bits are more than twice 24.
pub fn quantise(row: &[f64]) -> (f64, Vec<i32>) {
    let largest = row.iter().fold(0f64, |largest, x| largest.max(x.abs()));
    let scale = float::round(DType::F32, largest / 127.0);
    if scale == 0.0 {
        return (scale, vec![0; row.len()]);
    }
    let integer = |x: &f64| nearest(float::round(DType::F32, x / scale));
    (scale, row.iter().map(integer).collect())
}

fn nearest(x: f64) -> i32 {
    x.round_ties_even().clamp(-127.0, 127.0) as i32
}

/// [`quantise`] for values with errors: the scale, and the range of allowed integers for every element.
///
/// An element `x` has an error of up to its limit `e`, and so has the largest element, which determines the scale. The integers
/// between those of both ends of the interval are allowed.
pub fn quantise_reals(row: &[Real], gate: Gate) -> (Real, Vec<Vec<i32>>) {
    let limits: Vec<f64> = row.iter().map(|real| gate.limit(DType::F32, *real)).collect();
    let ends = |sign: f64| {
        let sizes = row.iter().zip(&limits).map(|(real, limit)| real.value.abs() + sign * limit);
        sizes.fold(0f64, f64::max) / 127.0 * (1.0 + sign * 2.0 * float::unit(DType::F32))
    };
    let (smallest, largest) = (ends(-1.0), ends(1.0));
    let order = |a: &&Real, b: &&Real| a.value.abs().total_cmp(&b.value.abs());
    let top = row.iter().max_by(order).copied().unwrap_or_default();
    // With errors, another element may be the largest: the scale covers all of them.
    let most = |part: fn(&Real) -> f64| row.iter().map(part).fold(0f64, f64::max) / 127.0;
    let scale = Real {
        value: top.value.abs() / 127.0,
        magnitude: most(|real| real.magnitude),
        inner: most(|real| real.inner),
        spread: most(|real| real.spread),
        terms: top.terms,
        ..Real::default()
    };
    let integers = row.iter().zip(&limits).map(|(real, limit)| {
        let quotients = [real.value - limit, real.value + limit]
            .into_iter()
            .flat_map(|x| [smallest, largest].map(|scale| if scale > 0.0 { x / scale } else { 0.0 }));
        let (low, high) = quotients.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), quotient| {
            (low.min(quotient), high.max(quotient))
        });
        (nearest(low)..=nearest(high)).collect()
    });
    (scale, integers.collect())
}

/// `x_scale * scale * sum_k x[k] * q[k] + bias`. The sum is exact, because its terms are integers.
pub fn dot(x: &[i32], x_scale: f64, q: &[i32], scale: f64, bias: f64) -> Real {
    let sum: i64 = x.iter().zip(q).map(|(x, q)| i64::from(*x) * i64::from(*q)).sum();
    let product = sum as f64 * x_scale * scale;
    Real::new(product + bias, product.abs() + bias.abs())
}

/// `sum_k scales[k / group] * x[k] * weight[k] + bias`, for groups of equal size.
pub fn dot_of_groups(x: &[i32], scales: &[f64], weight: &[Real], bias: f64) -> Real {
    let group = x.len() / scales.len().max(1);
    let (mut value, mut magnitude) = (0.0, 0.0);
    for (index, (x, weight)) in x.iter().zip(weight).enumerate() {
        let x = scales[index / group] * f64::from(*x);
        value += x * weight.value;
        magnitude += x.abs() * weight.magnitude;
    }
    Real::sum(value + bias, magnitude + bias.abs(), x.len() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_by_hand() {
        assert_eq!(quantise(&[254.0, -1.0, 3.0, 5.0, -254.0]), (2.0, vec![127, 0, 2, 2, -127]));
        assert_eq!(quantise(&[0.0, -0.0]), (0.0, vec![0, 0]));
        // The smallest f32 divided by 127 is 0.
        assert_eq!(quantise(&[2f64.powi(-149)]), (0.0, vec![0]));
    }

    #[test]
    fn errors_widen_the_choice_of_integers() {
        let row = [Real::new(127.0, 127.0), Real::new(2.5, 2.5), Real::new(1.0, 1.0)];
        let (scale, integers) = quantise_reals(&row, Gate::default());
        assert_eq!(scale.value, 1.0);
        assert_eq!(integers, [vec![127], vec![2, 3], vec![1]]);
        let rounded = row.map(|real| real.rounded_inside(real.value.abs(), 0.0));
        let (_, integers) = quantise_reals(&rounded, Gate { inner: Some(DType::BF16), exponential: false });
        assert_eq!((integers[0].first(), integers[0].last(), integers[2].len()), (Some(&125), Some(&127), 1));
    }

    #[test]
    fn groups_have_scales_of_their_own() {
        let weight = [Real::new(2.0, 4.0), Real::new(1.0, 1.0), Real::new(-1.0, 1.0), Real::new(0.5, 0.5)];
        let y = dot_of_groups(&[1, 2, 3, -4], &[10.0, 0.5], &weight, 1.0);
        // 10 (1 * 2 + 2 * 1) + 0.5 (3 * -1 - 4 * 0.5) + 1
        assert_eq!((y.value, y.magnitude, y.terms), (38.5, 63.5, 5));
        assert_eq!(dot_of_groups(&[], &[], &[], 3.0).value, 3.0);
        assert!(dot_of_groups(&[0, 1], &[f64::NAN, 1.0], &weight[..2], 0.0).value.is_nan());
    }

    #[test]
    fn sums_are_exact() {
        let (x, q) = (vec![127; 40_000], [vec![127; 20_000], vec![-127; 20_000]].concat());
        let mut x = x;
        x[0] = 126;
        assert_eq!(dot(&x, 2.0, &q, 0.5, 1.0).value, -126.0);
    }
}
