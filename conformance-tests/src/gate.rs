//! The allowed difference between a device and the oracle.
//!
//! There are two gates, and both must hold. With `y` the oracle's value, `ŷ` the device's, `u` the unit roundoff of the stored type
//! (f32 2⁻²⁴, f16 2⁻¹¹, bf16 2⁻⁸), `m` the magnitude and `n` the terms of [`Real`]:
//!
//! **Every element**: `|ŷ − y| ≤ 2u|y| + 8·2⁻²⁴·c·m (+ 2u'·m') (+ 2⁻²⁰|y|) + tiny`, where
//!
//! - `2u|y|` is one rounding on store: `u|y|` to nearest, twice that by truncation, which some hardware does. A second
//!   rounding on the way, as in an op put together from half-precision steps, does not fit in general.
//! - `8·2⁻²⁴·c·m` is f32 arithmetic. Errors of sums scale with the size of what is summed, not with the sum: this is what
//!   lets honest results pass when terms cancel, and still catches a single wrong element that an average hides.
//!   `c = max(1, √n / 4)` is for sums made one term after the other: the rounding of a partial sum that has grown to a
//!   share of `m` is up to 2⁻²⁴ of that share, `n` of them add up like a random walk to `2⁻²⁴ m √n / 3` (one standard
//!   deviation, all terms of one sign, the worst there is), and six deviations are `2√n · 2⁻²⁴ m`. Three, one in 370, would
//!   be too few for a suite of ten million elements. Seen: 11,200 sums of 192 terms, `m = 1.2|y|`, made by a library in plain
//!   f32. They were off by 4.7·2⁻²⁴ in the root mean square, where √192 / 3 is 4.6, and the farthest by 19·2⁻²⁴, which is
//!   four deviations and what the farthest of so many should be; it was 4% beyond three. Sums made in blocks are far below. An f16 accumulator is above from the first few terms on.
//! - `2u'·m'` stands only where the op's document allows an inner rounding, to type `'` of terms of size `m'`: attention
//!   weights, dequantised weights, what a region need not round but may. Two because of truncation, again.
//! - `2⁻²⁰|y|` stands only where a result is in proportion to an exponential, sine or logarithm that a device computes by
//!   its fast instructions: those are good to about 2⁻²¹ relative (`ex2.approx` plus the rounding of its argument).
//! - `tiny` is what is lost when subnormal numbers are flushed or truncated on the way: the larger of one subnormal step of
//!   the stored type and the smallest normal f32. For f16 that is its step, 2⁻²⁴: an f16 result must keep its subnormals. Copies,
//!   casts and additions keep them on the way too: for them, `tiny` is four subnormal steps of the stored type.
//!
//! A device may say that it flushes subnormal numbers of some types ([`dsrun_core::device::Flushed`]). Then zero stands for a
//! subnormal result, and a result is right too if it is that of operands in which subnormal numbers are zero. If the type is f32,
//! which ops compute in, the few steps of an addition, and the terms of a sum, may each lose up to the smallest normal f32 as well, times
//! what the step is multiplied by. The second gate leaves out elements that are right only because of that.
//!
//! **All elements of a result together**: the mean of `((ŷ − y) / s)²` is at most the limit below, with
//! `s = max(|y|, m / 64, m₂', smallest normal)` and `m₂'` the root of the sum of squares of inner terms:
//!
//! | type | limit | with inner rounding | why |
//! |---|---|---|---|
//! | f32 | 1e-10 | 1e-10 | far above f32 noise (an f32 rounding is 4e-15), far below TF32 or f16 inside (1e-7 and more) |
//! | f16 | 2e-7 | 5e-7 | one rounding by truncation is 1.7e-7, to nearest 4e-8; twice by truncation, 4e-7 |
//! | bf16 | 1.2e-5 | 3e-5 | one rounding by truncation is 1.1e-5, to nearest 3e-6; twice by truncation, 2.7e-5 |
//!
//! It catches what the element gate is too wide for: a bias of all elements, a cheaper type inside. Dividing each element
//! by its own size keeps a few large ones from hiding the rest. `m / 64` is there because an element whose terms cancel has
//! no relative accuracy: random signs make `m / |y|` about `√n`, 64 for 4096 terms. Where terms are rounded inside, their
//! errors add up to a rounding of `m₂'`, however small the sum is. A mean of few elements says little, so the gate needs 64
//! of them.
//!
//! To the limit is added the mean square of what one running sum of f32 loses, two standard deviations of it: `2·2⁻²⁴ √n / 3` of
//! `max(|y|, p, m / √n)`, which is how far its partial sums go with terms of one sign, of one sign and then taken off again
//! ([`Real::partial`], as the mean in a layer norm), and of random signs. It matters from tens of thousands of terms of one sign
//! on, and in a layer norm of elements that are close to their mean.
//!
//! Integers, copies and the values -inf, inf and NaN are exact, except that NaN is only asked for if the device says it is
//! strict about NaN ([`dsrun_core::device::DeviceProperties::strict_nan`]).
//!
//! No bound depends on the backend: there are no exceptions by name.

use crate::{float, real::Real};
use dsrun_core::DType;

/// The rounding that the documentation of an op allows beyond a single one after f32 arithmetic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gate {
    /// The type that terms may be rounded to on the way.
    pub inner: Option<DType>,
    /// Whether results are proportional to an exponential, sine or logarithm.
    pub exponential: bool,
}

impl Gate {
    /// The largest allowed difference of one element.
    pub fn limit(self, dtype: DType, real: Real) -> f64 {
        let tiny = float::subnormal_step(dtype).max(float::smallest_normal(DType::F32));
        self.normal_limit(dtype, real) + tiny
    }

    /// The same for an op that keeps subnormal numbers on the way: each of its few steps rounds to a subnormal step at most.
    pub fn exact_limit(self, dtype: DType, real: Real) -> f64 {
        self.normal_limit(dtype, real) + 4.0 * float::subnormal_step(dtype)
    }

    /// The same on a device that flushes subnormal f32: each of the few steps may lose one, or each of the terms of a sum, and what
    /// is lost may be multiplied afterwards.
    pub(crate) fn flushed_limit(self, dtype: DType, real: Real) -> f64 {
        let tiny = float::subnormal_step(dtype).max(float::smallest_normal(DType::F32));
        self.normal_limit(dtype, real) + real.terms.max(4) as f64 * tiny * real.gain.max(1.0)
    }

    pub(crate) fn normal_limit(self, dtype: DType, real: Real) -> f64 {
        let single = float::unit(DType::F32);
        let growth = ((real.terms as f64).sqrt() / 4.0).max(1.0);
        let inner = self.inner.map_or(0.0, |inner| 2.0 * float::unit(inner) * real.inner);
        let exponential = if self.exponential { 2f64.powi(-20) * real.value.abs() } else { 0.0 };
        2.0 * float::unit(dtype) * real.value.abs()
            + 8.0 * single * growth * real.magnitude
            + inner
            + exponential
    }

    /// The noise of a sum of f32 that is made one term after the other, two standard deviations.
    pub(crate) fn running_sum_noise(real: Real) -> f64 {
        let root = (real.terms as f64).sqrt();
        let farthest = real.value.abs().max(real.partial).max(real.magnitude / root.max(1.0));
        2.0 * float::unit(DType::F32) * root / 3.0 * farthest
    }

    /// The largest allowed mean of squared relative errors.
    pub fn mean_square_limit(self, dtype: DType) -> f64 {
        match (dtype, self.inner.is_some()) {
            (DType::F16, false) => 2e-7,
            (DType::F16, true) => 5e-7,
            (DType::BF16, false) => 1.2e-5,
            (DType::BF16, true) => 3e-5,
            // The error of a result that is wider than its inner rounding is that of the rounding.
            _ => match self.inner {
                Some(DType::F16) => 5e-7,
                Some(DType::BF16) => 3e-5,
                _ => 1e-10,
            },
        }
    }
}
