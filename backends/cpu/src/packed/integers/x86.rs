//! x86-64: AVX2 (two registers of eight sums) and AVX-512 with VNNI (one of sixteen).

use super::{Lanes, Product, WIDTH};
use std::{arch::x86_64::*, ops::Range};

/// AVX2.
#[derive(Clone, Copy, Debug)]
pub(in crate::packed) struct Avx2(());

/// AVX-512 F with VNNI.
#[derive(Clone, Copy, Debug)]
pub(in crate::packed) struct Vnni(());

// SAFETY of every block below: `self` exists, so the processor has the instructions; loads and stores go through
// references to arrays of exactly the length that is read or written, and need no alignment.

impl Avx2 {
    /// Proof that this processor has the instructions, if it has.
    pub(super) fn detect() -> Option<Self> {
        is_x86_feature_detected!("avx2").then_some(Self(()))
    }

    /// [`Product::panels`] compiled for these instructions. (In a closure it would be a function of its own, compiled without them,
    /// and every instruction a call.)
    pub(super) fn panels(self, product: &Product<'_>, panels: Range<usize>) {
        #[target_feature(enable = "avx2")]
        fn enter(lanes: Avx2, product: &Product<'_>, panels: Range<usize>) {
            product.panels(panels, &lanes);
        }
        // SAFETY: `self` exists, see above.
        unsafe { enter(self, product, panels) }
    }
}

impl Lanes for Avx2 {
    type Sums = [__m256i; 2];

    #[inline(always)]
    fn zeros(&self) -> Self::Sums {
        // SAFETY: `self` exists, see above.
        unsafe { [_mm256_setzero_si256(); 2] }
    }

    /// Bytes 0 and 2, then 1 and 3, as pairs of 16 bits, because products of bytes do not fit 8 bits.
    #[inline(always)]
    fn add(&self, mut sums: Self::Sums, weights: &[u32; WIDTH], x: u32) -> Self::Sums {
        let (low, high) = weights.split_at(WIDTH / 2);
        // SAFETY: eight elements each, see above.
        unsafe {
            let x = _mm256_set1_epi32(x as i32);
            let (x_even, x_odd) =
                (_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)), _mm256_srai_epi16::<8>(x));
            for (sums, half) in sums.iter_mut().zip([low, high]) {
                let bytes = _mm256_loadu_si256(half.as_ptr().cast());
                let even = _mm256_and_si256(bytes, _mm256_set1_epi16(255));
                let odd = _mm256_srli_epi16::<8>(bytes);
                *sums = _mm256_add_epi32(*sums, _mm256_madd_epi16(even, x_even));
                *sums = _mm256_add_epi32(*sums, _mm256_madd_epi16(odd, x_odd));
            }
        }
        sums
    }

    #[inline(always)]
    fn store(&self, sums: Self::Sums) -> [i32; WIDTH] {
        let mut out = [0; WIDTH];
        let (low, high) = out.split_at_mut(WIDTH / 2);
        // SAFETY: eight elements each, see above.
        unsafe {
            _mm256_storeu_si256(low.as_mut_ptr().cast(), sums[0]);
            _mm256_storeu_si256(high.as_mut_ptr().cast(), sums[1]);
        }
        out
    }
}

impl Vnni {
    /// Proof that this processor has the instructions, if it has.
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni")).then_some(Self(()))
    }

    /// As [`Avx2::panels`].
    pub(super) fn panels(self, product: &Product<'_>, panels: Range<usize>) {
        #[target_feature(enable = "avx512f,avx512vnni")]
        fn enter(lanes: Vnni, product: &Product<'_>, panels: Range<usize>) {
            product.panels(panels, &lanes);
        }
        // SAFETY: `self` exists, see above.
        unsafe { enter(self, product, panels) }
    }
}

impl Lanes for Vnni {
    type Sums = __m512i;

    #[inline(always)]
    fn zeros(&self) -> __m512i {
        // SAFETY: `self` exists, see above.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    fn add(&self, sums: __m512i, weights: &[u32; WIDTH], x: u32) -> __m512i {
        // SAFETY: sixteen elements, see above.
        unsafe {
            let weights = _mm512_loadu_si512(weights.as_ptr().cast());
            _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(x as i32))
        }
    }

    #[inline(always)]
    fn store(&self, sums: __m512i) -> [i32; WIDTH] {
        let mut out = [0; WIDTH];
        // SAFETY: sixteen elements, see above.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), sums) };
        out
    }
}
