//! Seeded random numbers for the case tables. A seed gives the same numbers on every machine and in every version, so that the
//! id of a case determines its values.

use crate::{float, tensor::Tensor};
use dsrun_core::DType;

/// A stream of random numbers: SplitMix64.
///
/// Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

/// A distribution of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Between -1 and 1.
    Uniform,
    /// Normal with now and then a value a hundred times as large, as activations of language models are.
    HeavyTailed,
    /// Near one large value: sums grow and differences cancel.
    LargeMean,
    /// Below the smallest normal value of the type, mixed with small normal ones.
    Subnormal,
    /// Normal, with infinities and NaN strewn in.
    Special,
    /// Normal, with infinity and NaN in rare places, so that most rows have at most one.
    Rare,
    /// Normal, with NaN in rare places and no infinities.
    Nan,
    /// Zeros of both signs.
    Zeros,
    /// Up to a thousandth of the largest value of the type.
    Large,
}

impl Values {
    /// The distributions of finite values of normal size, with which most ops are tested.
    pub const USUAL: [Self; 3] = [Self::Uniform, Self::HeavyTailed, Self::LargeMean];
}

/// Values of a matrix that are drawn, at most: drawing a hundred million of them would take longer than all the rest. The number is
/// prime, so rows, blocks and experts that are not a multiple of it apart begin in different places.
const DRAWN: usize = 65_521;

impl Random {
    /// The stream of a name, for example the id of a case.
    pub fn named(name: &str) -> Self {
        // FNV-1a. Any hash will do, but a change would change all cases.
        let hash = name.bytes().fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
        });
        Self { state: hash }
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number of at least 0 and below 1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / 2f64.powi(53)
    }

    /// A number of at least `low` and below `high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// A whole number below `bound`, which must not be 0. The bias of the remainder is negligible for the bounds used here.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound.max(1) as u64) as usize
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// One of `of`.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Mean 0, standard deviation 1: the transform of Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// A value of a distribution.
    pub fn value(&mut self, dtype: DType, values: Values) -> f64 {
        match values {
            Values::Uniform => self.between(-1.0, 1.0),
            Values::HeavyTailed if self.chance(0.01) => self.normal().clamp(-3.0, 3.0) * 100.0,
            Values::HeavyTailed => self.normal(),
            Values::LargeMean if dtype == DType::F32 => 1000.0 + self.normal(),
            Values::LargeMean => 30.0 + self.normal(),
            Values::Subnormal => self.between(-4.0, 4.0) * float::smallest_normal(dtype),
            Values::Rare => match self.below(150) {
                0 => f64::INFINITY,
                1 => f64::NAN,
                _ => self.normal(),
            },
            Values::Nan => match self.below(150) {
                0 => f64::NAN,
                _ => self.normal(),
            },
            Values::Zeros => self.pick(&[0.0, -0.0]),
            Values::Large => self.between(-1.0, 1.0) * float::largest(dtype) / 1000.0,
            Values::Special => match self.below(12) {
                0 => f64::INFINITY,
                1 => f64::NEG_INFINITY,
                2 => f64::NAN,
                _ => self.normal(),
            },
        }
    }

    /// A tensor of a distribution's values.
    pub fn tensor(&mut self, dtype: DType, shape: &[usize], values: Values) -> Tensor {
        self.scaled(dtype, shape, values, 1.0)
    }

    /// A tensor of a distribution's values, each multiplied by `factor`.
    pub fn scaled(&mut self, dtype: DType, shape: &[usize], values: Values, factor: f64) -> Tensor {
        let count = shape.iter().product();
        let all: Vec<f64> = (0..count).map(|_| self.value(dtype, values) * factor).collect();
        Tensor::floats(dtype, shape, &all)
    }

    /// [`Self::scaled`] for weights, which are large: after some ten thousands, the values repeat.
    pub fn matrix(&mut self, dtype: DType, shape: [usize; 2], values: Values, factor: f64) -> Tensor {
        let count = shape[0] * shape[1];
        let mut tensor = self.scaled(dtype, &[count.min(DRAWN)], values, factor);
        tensor.shape = shape.to_vec();
        while tensor.bits.len() < count {
            tensor.bits.extend_from_within(..DRAWN.min(count - tensor.bits.len()));
        }
        tensor
    }

    /// The numbers below `count` in random order.
    pub fn shuffled(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_stable() {
        // The first outputs for state 0, as published with the generator.
        let mut random = Random { state: 0 };
        assert_eq!([random.bits(), random.bits()], [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4]);
        assert_ne!(Random::named("a").bits(), Random::named("b").bits());
    }

    #[test]
    fn distributions_are_what_they_say() {
        let mut random = Random::named("distributions");
        let normals: Vec<f64> = (0..10_000).map(|_| random.normal()).collect();
        let mean = normals.iter().sum::<f64>() / 1e4;
        let variance = normals.iter().map(|x| x * x).sum::<f64>() / 1e4;
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
        let subnormal = random.tensor(DType::F16, &[100], Values::Subnormal).values();
        assert!(subnormal.iter().any(|x| *x != 0.0 && x.abs() < float::smallest_normal(DType::F16)));
        let mut order = random.shuffled(50);
        order.sort_unstable();
        assert!(order.into_iter().eq(0..50));
    }
}
