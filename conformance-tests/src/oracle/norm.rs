//! Oracle of `rms_norm` and `layer_norm`, one group of features at a time.

use super::Real;

/// `x * rsqrt(mean(x^2) + eps) * (weight + offset)` over one group.
pub fn rms_norm(x: &[f64], weight: &[f64], eps: f64, offset: f64) -> Vec<Real> {
    let mean_square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean_square + eps).sqrt();
    let terms = x.len();
    let one = |(x, weight): (&f64, &f64)| {
        let normed = x * factor;
        Real::sum(normed * (weight + offset), normed.abs() * (weight.abs() + offset.abs()), terms)
    };
    x.iter().zip(weight).map(one).collect()
}

/// `(x - mean) * rsqrt(var + eps) * weight + bias` over one row.
///
/// The error of the mean scales with the mean absolute value of `x`, even where `x - mean` is small.
pub fn layer_norm(x: &[f64], weight: Option<&[f64]>, bias: Option<&[f64]>, eps: f64) -> Vec<Real> {
    let count = x.len() as f64;
    let mean = x.iter().sum::<f64>() / count;
    let mean_size = x.iter().map(|x| x.abs()).sum::<f64>() / count;
    let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count;
    let factor = 1.0 / (variance + eps).sqrt();
    let one = |(index, value): (usize, &f64)| {
        let weight = weight.map_or(1.0, |weight| weight[index]);
        let bias = bias.map_or(0.0, |bias| bias[index]);
        let magnitude = (value.abs() + mean_size) * factor * weight.abs() + bias.abs();
        let real = Real::sum((value - mean) * factor * weight + bias, magnitude, x.len());
        // One running sum of the elements goes as far as the mean times their number before the mean is taken off.
        real.by_way_of(mean.abs() * factor * weight.abs())
    };
    x.iter().enumerate().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(reals: &[Real]) -> Vec<f64> {
        reals.iter().map(|real| real.value).collect()
    }

    #[test]
    fn rms_norm_by_hand() {
        // mean of squares of (3, 4, 0, 0) and eps: (25 / 4) + 2.75 = 9, so the factor is a third.
        let y = rms_norm(&[3.0, 4.0, 0.0, 0.0], &[1.0, 2.0, 1.0, 1.0], 2.75, 1.0);
        assert_eq!(values(&y), [2.0, 4.0, 0.0, 0.0]);
    }

    #[test]
    fn layer_norm_by_hand() {
        // mean 2, deviations -2, 0, 2, 0, variance 2, and eps 2: the factor is a half.
        let y =
            layer_norm(&[0.0, 2.0, 4.0, 2.0], Some(&[1.0, 1.0, 3.0, 1.0]), Some(&[0.0, 5.0, 1.0, 0.0]), 2.0);
        assert_eq!(values(&y), [-1.0, 5.0, 4.0, 0.0]);
        assert_eq!(values(&layer_norm(&[0.0, 2.0, 4.0, 2.0], None, None, 2.0)), [-1.0, 0.0, 1.0, 0.0]);
    }
}
