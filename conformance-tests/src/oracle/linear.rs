//! Oracle of `linear`.

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
}
