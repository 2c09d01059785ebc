//! Oracle of `linear` and `matmul`.

use super::Real;

/// `sum_k x[k] * weight[k] + bias`. The weight of every product may be rounded.
pub fn dot(x: impl IntoIterator<Item = f64>, weight: impl IntoIterator<Item = f64>, bias: f64) -> Real {
    let (mut value, mut products, mut squares, mut terms) = (0.0, 0.0f64, 0.0f64, 1);
    for (x, weight) in x.into_iter().zip(weight) {
        value += x * weight;
        products += (x * weight).abs();
        squares += (x * weight) * (x * weight);
        terms += 1;
    }
    Real::sum(value + bias, products + bias.abs(), terms).rounded_inside(products, squares.sqrt())
}

/// `y[m, n] = sum_k x[m, k] * weight[n, k] + bias[n]`, row-major.
pub fn linear(x: &[f64], weight: &[f64], bias: Option<&[f64]>, [m, n, k]: [usize; 3]) -> Vec<Real> {
    let cell = |index: usize| {
        let (row, column) = (index / n, index % n);
        let (x, weight) = (&x[row * k..][..k], &weight[column * k..][..k]);
        dot(x.iter().copied(), weight.iter().copied(), bias.map_or(0.0, |bias| bias[column]))
    };
    (0..m * n).map(cell).collect()
}

/// `y[g, m, n] = sum_k a[g, m, k] * b[g, k, n]`, or `b[g, n, k]` if transposed. Inner rounding is not allowed.
pub fn matmul(a: &[f64], b: &[f64], transposed: bool, [groups, m, n, k]: [usize; 4]) -> Vec<Real> {
    let cell = |index: usize| {
        let (group, row, column) = (index / (m * n), index / n % m, index % n);
        let a = (0..k).map(|inner| a[(group * m + row) * k + inner]);
        let b = (0..k)
            .map(|inner| b[group * n * k + if transposed { column * k + inner } else { inner * n + column }]);
        dot(a, b, 0.0).rounded_inside(0.0, 0.0)
    };
    (0..groups * m * n).map(cell).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(reals: &[Real]) -> Vec<f64> {
        reals.iter().map(|real| real.value).collect()
    }

    #[test]
    fn linear_by_hand() {
        let y = linear(
            &[1.0, 2.0, 3.0, -1.0],
            &[1.0, 1.0, 0.0, 2.0, 5.0, 0.0],
            Some(&[0.0, 10.0, 0.0]),
            [2, 3, 2],
        );
        assert_eq!(values(&y), [3.0, 14.0, 5.0, 2.0, 8.0, 15.0]);
        assert_eq!((y[3].magnitude, y[3].inner, y[1].spread), (4.0, 4.0, 4.0));
        assert_eq!(y[4].magnitude, 12.0);
    }

    #[test]
    fn matmul_by_hand_both_ways() {
        let a = [1.0, 2.0, 0.0, 1.0, 3.0, 4.0];
        // Two groups of 1 x 3 times 3 x 2.
        let b = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0];
        let transposed = [1.0, 3.0, 5.0, 2.0, 4.0, 6.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0];
        for (b, flag) in [(&b, false), (&transposed, true)] {
            assert_eq!(values(&matmul(&a, b, flag, [2, 1, 2, 3])), [7.0, 10.0, 5.0, 7.0]);
        }
        assert_eq!(values(&matmul(&[], &[], false, [1, 1, 2, 0])), [0.0, 0.0]);
    }
}
