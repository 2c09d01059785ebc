//! The dot product with AVX2 and fused multiply-add.

use std::arch::x86_64::{
    __m256, _mm_add_ps, _mm_storeu_ps, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_fmadd_ps,
    _mm256_hadd_ps, _mm256_loadu_ps, _mm256_setzero_ps,
};

/// Numbers of a register.
const LANES: usize = 8;

/// Sums in flight: enough to hide the latency of the multiply-add.
const SUMS: usize = 4;

#[inline]
#[target_feature(enable = "avx2,fma")]
fn load(numbers: &[f32; LANES]) -> __m256 {
    // SAFETY: the array has as many numbers as the register, and the load needs no alignment.
    unsafe { _mm256_loadu_ps(numbers.as_ptr()) }
}

/// See [`super::dot`]. Four sums at a time, one for every fourth register.
#[target_feature(enable = "avx2,fma")]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_groups, a_rest) = a.as_chunks::<{ SUMS * LANES }>();
    let (b_groups, b_rest) = b.as_chunks::<{ SUMS * LANES }>();
    let mut sums = [_mm256_setzero_ps(); SUMS];
    for (a, b) in a_groups.iter().zip(b_groups) {
        let (a, b) = (a.as_chunks::<LANES>().0, b.as_chunks::<LANES>().0);
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum = _mm256_fmadd_ps(load(a), load(b), *sum);
        }
    }
    let [a, b, c, d] = total(sums);
    let rest = a_rest.iter().zip(b_rest);
    rest.fold((a + b) + (c + d), |sum, (a, b)| a.mul_add(*b, sum))
}

/// The sum of each register.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn total(sums: [__m256; SUMS]) -> [f32; SUMS] {
    let [a, b, c, d] = sums;
    let quarters = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    let halves = _mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps::<1>(quarters));
    let mut totals = [0.0; SUMS];
    // SAFETY: the array has as many numbers as the register, and the store needs no alignment.
    unsafe { _mm_storeu_ps(totals.as_mut_ptr(), halves) };
    totals
}
