//! Dot products with AVX2 and fused multiply-add.

use std::arch::x86_64::{
    __m256, _mm_add_ps, _mm_storeu_ps, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_fmadd_ps,
    _mm256_hadd_ps, _mm256_loadu_ps, _mm256_setzero_ps,
};

/// Numbers of a register.
const LANES: usize = 8;

/// Rows worked on at a time: enough sums in flight to hide the latency of the multiply-add.
const ROWS: usize = 4;

#[inline]
#[target_feature(enable = "avx2,fma")]
fn load(numbers: &[f32; LANES]) -> __m256 {
    // SAFETY: the array has as many numbers as the register, and the load needs no alignment.
    unsafe { _mm256_loadu_ps(numbers.as_ptr()) }
}

/// See [`super::dot`]. Four sums at a time, one for every fourth register.
#[target_feature(enable = "avx2,fma")]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_groups, a_rest) = a.as_chunks::<{ ROWS * LANES }>();
    let (b_groups, b_rest) = b.as_chunks::<{ ROWS * LANES }>();
    let mut sums = [_mm256_setzero_ps(); ROWS];
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

/// See [`super::dot_rows`].
///
/// Every row is summed in the same order, whether it is one of four or alone.
#[target_feature(enable = "avx2,fma")]
pub(super) fn dot_rows(vector: &[f32], rows: &[f32], stride: usize, out: &mut [f32]) {
    let row = |index: usize| &rows[index * stride..][..vector.len()];
    let (groups, rest) = out.as_chunks_mut::<ROWS>();
    let rest_start = groups.len() * ROWS;
    for (index, out) in groups.iter_mut().enumerate() {
        *out = dots(vector, std::array::from_fn(|offset| row(index * ROWS + offset)));
    }
    for (index, out) in rest.iter_mut().enumerate() {
        *out = dots(vector, [row(rest_start + index)])[0];
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn dots<const N: usize>(vector: &[f32], rows: [&[f32]; N]) -> [f32; N] {
    let (groups, rest) = vector.as_chunks::<LANES>();
    let row_groups = rows.map(|row| row.as_chunks::<LANES>().0);
    let mut sums = [_mm256_setzero_ps(); ROWS];
    for (index, group) in groups.iter().enumerate() {
        let numbers = load(group);
        for (sum, row) in sums.iter_mut().zip(row_groups) {
            *sum = _mm256_fmadd_ps(numbers, load(&row[index]), *sum);
        }
    }
    let mut totals = total(sums);
    let rest_start = groups.len() * LANES;
    std::array::from_fn(|index| {
        let pairs = rest.iter().zip(&rows[index][rest_start..]);
        pairs.fold(std::mem::take(&mut totals[index]), |sum, (a, b)| a.mul_add(*b, sum))
    })
}

/// The sum of each register.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn total(sums: [__m256; ROWS]) -> [f32; ROWS] {
    let [a, b, c, d] = sums;
    let quarters = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    let halves = _mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps::<1>(quarters));
    let mut totals = [0.0; ROWS];
    // SAFETY: the array has as many numbers as the register, and the store needs no alignment.
    unsafe { _mm_storeu_ps(totals.as_mut_ptr(), halves) };
    totals
}
