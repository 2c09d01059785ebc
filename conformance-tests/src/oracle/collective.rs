//! Oracle of reductions over ranks. The other collectives only copy.

use super::{Real, float};
use dsrun_core::{DType, op::Reduction};

/// An element reduced over the ranks.
pub enum Reduced {
    /// Exact bits: integers, and the maximum or minimum of floats.
    Bits(u32),
    /// A float sum or mean.
    Float(Real),
}

/// Reduces an element, given its bits on each rank.
///
/// A sum of `n` floats passes `n - 1` hops, each rounded to the element type at worst: an error of `(n - 1) u m`, with `m`
/// the sum of absolute values. The gate allows `2 u` on the inner magnitude, which is therefore `n m / 2`.
pub fn reduce(dtype: DType, reduction: Reduction, ranks: &[u32]) -> Reduced {
    let values: Vec<f64> = ranks.iter().map(|bits| float::value(dtype, *bits)).collect();
    let pick = |better: fn(f64, f64) -> bool| {
        let best = (1..values.len())
            .fold(0, |best, rank| if better(values[rank], values[best]) { rank } else { best });
        Reduced::Bits(ranks[best])
    };
    match reduction {
        Reduction::Max => pick(|a, b| a > b),
        Reduction::Min => pick(|a, b| a < b),
        Reduction::Sum | Reduction::Mean if dtype.is_float() => {
            let count = values.len() as f64;
            let part = if reduction == Reduction::Mean { count } else { 1.0 };
            let magnitude = values.iter().map(|value| value.abs()).sum::<f64>() / part;
            let inner = if values.len() > 1 { magnitude * count / 2.0 } else { 0.0 };
            let sum = values.iter().sum::<f64>() / part;
            Reduced::Float(Real::sum(sum, magnitude, values.len()).rounded_inside(inner, inner))
        }
        Reduction::Sum | Reduction::Mean => {
            let mask = u32::MAX >> (32 - 8 * dtype.bytes());
            Reduced::Bits(ranks.iter().fold(0u32, |sum, bits| sum.wrapping_add(*bits)) & mask)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_by_hand() {
        let bits = |reduced| match reduced {
            Reduced::Bits(bits) => bits as i32,
            Reduced::Float(real) => panic!("{real:?}"),
        };
        let ranks = [3, -5i32 as u32, 7];
        assert_eq!(bits(reduce(DType::I32, Reduction::Sum, &ranks)), 5);
        assert_eq!(bits(reduce(DType::I32, Reduction::Max, &ranks)), 7);
        assert_eq!(bits(reduce(DType::I32, Reduction::Min, &ranks)), -5);
        assert_eq!(bits(reduce(DType::I8, Reduction::Sum, &[0xFF, 0xFE])), 0xFD);
        let floats = [1.0f32, -2.0, 4.0].map(f32::to_bits);
        let Reduced::Float(mean) = reduce(DType::F32, Reduction::Mean, &floats) else { panic!("no float") };
        assert_eq!((mean.value, mean.magnitude, mean.inner), (1.0, 7.0 / 3.0, 3.5));
        let smallest = reduce(DType::F32, Reduction::Min, &floats);
        assert!(matches!(smallest, Reduced::Bits(bits) if bits == (-2.0f32).to_bits()));
    }
}
