//! x86-64: AVX2 (two registers of eight lanes) and AVX-512 (one of sixteen).

mod transpose;

use super::{Lanes, Task, WIDTH};
use std::arch::{asm, x86_64::*};
use transpose::{signed_byte_8, transpose_8, transpose_words, transpose_words_8};

/// AVX2 with FMA and F16C: every x86-64 processor since 2013 (Intel) and 2015 (AMD) but a few small ones. With `VNNI` also
/// AVX-VNNI, which multiplies bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2<const VNNI: bool>(());

impl<const VNNI: bool> Avx2<VNNI> {
    /// Proof that this processor has the instructions, if it has.
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!VNNI || is_x86_feature_detected!("avxvnni"));
        found.then_some(Self(()))
    }

    /// The same set without the multiplication of bytes.
    pub(super) fn floats(self) -> Avx2<false> {
        Avx2(())
    }
}

/// AVX-512 F (foundation) and BW (bytes and words), with all of [`Avx2`]. With `VNNI` also AVX-512 VNNI, which multiplies bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512<const VNNI: bool>(());

impl<const VNNI: bool> Avx512<VNNI> {
    /// Proof that this processor has the instructions, if it has.
    pub(crate) fn detect() -> Option<Self> {
        let found = Avx2::<false>::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && (!VNNI || is_x86_feature_detected!("avx512vnni"));
        found.then_some(Self(()))
    }

    /// The same set without the multiplication of bytes.
    pub(super) fn floats(self) -> Avx512<false> {
        Avx512(())
    }
}

/// Adds the products of bytes as [`Lanes::dot`], for eight sums.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn dot_8(sums: __m256i, weights: __m256i, x: __m256i) -> __m256i {
    // SAFETY: by the caller's promise.
    unsafe {
        // Bytes 0 and 2, then 1 and 3, as pairs of 16 bits.
        let (x_even, x_odd) = (_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)), _mm256_srai_epi16::<8>(x));
        let even = _mm256_madd_epi16(_mm256_and_si256(weights, _mm256_set1_epi16(255)), x_even);
        let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(weights), x_odd);
        _mm256_add_epi32(sums, _mm256_add_epi32(even, odd))
    }
}

/// Adds the products of small bytes as [`Lanes::dot_small`] in pairs, for sixteen sums. Two products of at most 127 * 127 fit 16 bits.
///
/// Volatile instructions stay in order: left to itself the compiler reorders the sums of several rows such that registers do not suffice.
#[inline]
#[target_feature(enable = "avx2")]
fn dot_pairs(mut sums: __m256i, weights: __m256i, x: __m256i) -> __m256i {
    // SAFETY: the instructions read and write these registers only, and the function enables their feature.
    unsafe {
        asm!(
            "vpmaddubsw {products}, {weights}, {x}",
            "vpaddw {sums}, {sums}, {products}",
            products = out(ymm_reg) _, sums = inout(ymm_reg) sums, weights = in(ymm_reg) weights, x = in(ymm_reg) x,
            options(nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// Adds up the two sums of each pair.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn add_pairs(sums: __m256i) -> __m256i {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) }
}

// SAFETY of every block below: `self` exists, so the processor has the instructions; loads and stores go through
// references to arrays of exactly the length that is read or written, and need no alignment.

impl<const VNNI: bool> Lanes for Avx2<VNNI> {
    type Float = [__m256; 2];
    type Bits = [__m256i; 2];
    type Sums = [__m256i; 2];

    const IN_PAIRS: bool = !VNNI;
    // 6 rows x 2 registers of sums, 2 of weights, 1 of activations: 15 of 16.
    const ROWS: usize = 6;
    const ROWS_DECODING: usize = 4;
    // 4 rows x 2 registers of integers, 2 of weights, 3 of activations, 1 of products, 1 of constants: 15 of 16. The sums in f32 are in
    // memory.
    const ROWS_INTEGERS: usize = 4;

    #[inline(always)]
    fn run<T: Task>(self, task: T) -> T::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn enter<T: Task, const VNNI: bool>(lanes: Avx2<VNNI>, task: T) -> T::Output {
            task.run(lanes)
        }
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
        fn enter_vnni<T: Task, const VNNI: bool>(lanes: Avx2<VNNI>, task: T) -> T::Output {
            task.run(lanes)
        }
        // SAFETY: `self` exists, see above.
        unsafe { if VNNI { enter_vnni(self, task) } else { enter(self, task) } }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    fn load(self, from: &[f32; WIDTH]) -> Self::Float {
        let (low, high) = from.split_at(WIDTH / 2);
        // SAFETY: eight elements each, see above.
        unsafe { [_mm256_loadu_ps(low.as_ptr()), _mm256_loadu_ps(high.as_ptr())] }
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; WIDTH]) -> Self::Float {
        let (low, high) = from.split_at(WIDTH / 2);
        // SAFETY: eight elements each, see above.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(low.as_ptr().cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(high.as_ptr().cast())),
            ]
        }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; WIDTH]) -> Self::Float {
        let (low, high) = from.split_at(WIDTH / 2);
        // SAFETY: eight elements each, see above.
        unsafe {
            [low, high].map(|half| {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(half.as_ptr().cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            })
        }
    }

    #[inline(always)]
    fn load_u8(self, from: &[u8; WIDTH]) -> Self::Float {
        // SAFETY: sixteen elements, see above.
        unsafe {
            let bytes = _mm_loadu_si128(from.as_ptr().cast());
            [
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes))),
            ]
        }
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; WIDTH]) -> Self::Float {
        // SAFETY: sixteen elements, see above.
        unsafe {
            let bytes = _mm_loadu_si128(from.as_ptr().cast());
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes))),
            ]
        }
    }

    #[inline(always)]
    fn transpose_words(self, rows: [&[i8; WIDTH]; WIDTH]) -> [Self::Bits; 4] {
        // SAFETY: `self` exists, see above.
        let [low, high] = unsafe { [transpose_words_8(&rows, 0), transpose_words_8(&rows, 8)] };
        [[low[0], high[0]], [low[1], high[1]], [low[2], high[2]], [low[3], high[3]]]
    }

    #[inline(always)]
    fn signed_byte<const SHIFT: u32>(self, words: Self::Bits) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { [signed_byte_8::<SHIFT>(words[0]), signed_byte_8::<SHIFT>(words[1])] }
    }

    #[inline(always)]
    fn load_bits(self, from: &[u32; WIDTH]) -> Self::Bits {
        let (low, high) = from.split_at(WIDTH / 2);
        // SAFETY: eight elements each, see above.
        unsafe { [_mm256_loadu_si256(low.as_ptr().cast()), _mm256_loadu_si256(high.as_ptr().cast())] }
    }

    #[inline(always)]
    fn store_bits(self, bits: Self::Bits, to: &mut [u32; WIDTH]) {
        let (low, high) = to.split_at_mut(WIDTH / 2);
        // SAFETY: eight elements each, see above.
        unsafe {
            _mm256_storeu_si256(low.as_mut_ptr().cast(), bits[0]);
            _mm256_storeu_si256(high.as_mut_ptr().cast(), bits[1]);
        }
    }

    #[inline(always)]
    fn store(self, value: Self::Float, to: &mut [f32; WIDTH]) {
        let (low, high) = to.split_at_mut(WIDTH / 2);
        // SAFETY: eight elements each, see above.
        unsafe {
            _mm256_storeu_ps(low.as_mut_ptr(), value[0]);
            _mm256_storeu_ps(high.as_mut_ptr(), value[1]);
        }
    }

    #[inline(always)]
    fn mul(self, a: Self::Float, b: Self::Float) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn masked(self, bits: Self::Bits, mask: u32) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe {
            let mask = _mm256_set1_epi32(mask as i32);
            [
                _mm256_cvtepi32_ps(_mm256_and_si256(bits[0], mask)),
                _mm256_cvtepi32_ps(_mm256_and_si256(bits[1], mask)),
            ]
        }
    }

    #[inline(always)]
    fn shifted<const SHIFT: u32>(self, bits: Self::Bits) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe {
            let count = _mm_cvtsi32_si128(SHIFT as i32);
            [
                _mm256_cvtepi32_ps(_mm256_srl_epi32(bits[0], count)),
                _mm256_cvtepi32_ps(_mm256_srl_epi32(bits[1], count)),
            ]
        }
    }

    #[inline(always)]
    fn field<const SHIFT: i32>(self, bits: Self::Bits, mask: u32) -> Self::Bits {
        // SAFETY: `self` exists, see above.
        unsafe {
            let (count, mask) = (_mm_cvtsi32_si128(SHIFT.abs()), _mm256_set1_epi32(mask as i32));
            let shifted = if SHIFT < 0 {
                [_mm256_sll_epi32(bits[0], count), _mm256_sll_epi32(bits[1], count)]
            } else {
                [_mm256_srl_epi32(bits[0], count), _mm256_srl_epi32(bits[1], count)]
            };
            [_mm256_and_si256(shifted[0], mask), _mm256_and_si256(shifted[1], mask)]
        }
    }

    #[inline(always)]
    fn or(self, a: Self::Bits, b: Self::Bits) -> Self::Bits {
        // SAFETY: `self` exists, see above.
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn splat_sums(self, value: i32) -> Self::Sums {
        // SAFETY: `self` exists, see above.
        unsafe { [_mm256_set1_epi32(value); 2] }
    }

    #[inline(always)]
    fn dot(self, sums: Self::Sums, weights: Self::Bits, x: u32) -> Self::Sums {
        // SAFETY: `self` exists, see above.
        unsafe {
            let x = _mm256_set1_epi32(x as i32);
            if VNNI {
                return [
                    _mm256_dpbusd_avx_epi32(sums[0], weights[0], x),
                    _mm256_dpbusd_avx_epi32(sums[1], weights[1], x),
                ];
            }
            [dot_8(sums[0], weights[0], x), dot_8(sums[1], weights[1], x)]
        }
    }

    #[inline(always)]
    fn dot_small(self, sums: Self::Sums, weights: Self::Bits, x: u32) -> Self::Sums {
        if VNNI {
            return self.dot(sums, weights, x);
        }
        // SAFETY: `self` exists, see above.
        unsafe {
            let x = _mm256_set1_epi32(x as i32);
            [dot_pairs(sums[0], weights[0], x), dot_pairs(sums[1], weights[1], x)]
        }
    }

    #[inline(always)]
    fn widen_small(self, sums: Self::Sums) -> Self::Sums {
        // SAFETY: `self` exists, see above.
        if VNNI { sums } else { unsafe { [add_pairs(sums[0]), add_pairs(sums[1])] } }
    }

    #[inline(always)]
    fn load_sums(self, from: &[i32; WIDTH]) -> Self::Sums {
        let (low, high) = from.split_at(WIDTH / 2);
        // SAFETY: eight elements each, see above.
        unsafe { [_mm256_loadu_si256(low.as_ptr().cast()), _mm256_loadu_si256(high.as_ptr().cast())] }
    }

    #[inline(always)]
    fn add_sums(self, a: Self::Sums, b: Self::Sums) -> Self::Sums {
        // SAFETY: `self` exists, see above.
        unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
    }

    #[inline(always)]
    fn sums_to_float(self, sums: Self::Sums) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { [_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])] }
    }

    #[inline(always)]
    fn transpose(self, vectors: [Self::Float; WIDTH]) -> [Self::Float; WIDTH] {
        // Four squares of eight: those off the diagonal change places.
        let mut out = vectors;
        for row in [0, 8] {
            for column in [0, 1] {
                let mut square = [vectors[row][column]; 8];
                for (index, register) in square.iter_mut().enumerate() {
                    *register = vectors[row + index][column];
                }
                // SAFETY: `self` exists, see above.
                let square = unsafe { transpose_8(square) };
                for (index, register) in square.into_iter().enumerate() {
                    out[8 * column + index][row / 8] = register;
                }
            }
        }
        out
    }

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}

impl<const VNNI: bool> Lanes for Avx512<VNNI> {
    type Float = __m512;
    type Bits = __m512i;
    type Sums = __m512i;

    const IN_PAIRS: bool = !VNNI;
    // 12 registers of sums keep two multiply-adders of latency four busy; there are 32.
    const ROWS: usize = 12;
    const ROWS_DECODING: usize = 12;
    const ROWS_INTEGERS: usize = 12;
    const UNPACKS: bool = false;

    #[inline(always)]
    fn run<T: Task>(self, task: T) -> T::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx2,fma,f16c")]
        fn enter<T: Task, const VNNI: bool>(lanes: Avx512<VNNI>, task: T) -> T::Output {
            task.run(lanes)
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
        fn enter_vnni<T: Task, const VNNI: bool>(lanes: Avx512<VNNI>, task: T) -> T::Output {
            task.run(lanes)
        }
        // SAFETY: `self` exists, see above.
        unsafe { if VNNI { enter_vnni(self, task) } else { enter(self, task) } }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, from: &[f32; WIDTH]) -> Self::Float {
        // SAFETY: sixteen elements, see above.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; WIDTH]) -> Self::Float {
        // SAFETY: sixteen elements, see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; WIDTH]) -> Self::Float {
        // SAFETY: sixteen elements, see above.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    fn load_u8(self, from: &[u8; WIDTH]) -> Self::Float {
        // SAFETY: sixteen elements, see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; WIDTH]) -> Self::Float {
        // SAFETY: sixteen elements, see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn transpose_words(self, rows: [&[i8; WIDTH]; WIDTH]) -> [Self::Bits; 4] {
        // SAFETY: `self` exists, see above.
        unsafe { transpose_words(&rows) }
    }

    #[inline(always)]
    fn signed_byte<const SHIFT: u32>(self, words: Self::Bits) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<SHIFT>(words))) }
    }

    #[inline(always)]
    fn load_bits(self, from: &[u32; WIDTH]) -> Self::Bits {
        // SAFETY: sixteen elements, see above.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_bits(self, bits: Self::Bits, to: &mut [u32; WIDTH]) {
        // SAFETY: sixteen elements, see above.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), bits) }
    }

    #[inline(always)]
    fn store(self, value: Self::Float, to: &mut [f32; WIDTH]) {
        // SAFETY: sixteen elements, see above.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
    }

    #[inline(always)]
    fn mul(self, a: Self::Float, b: Self::Float) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn masked(self, bits: Self::Bits, mask: u32) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_and_si512(bits, _mm512_set1_epi32(mask as i32))) }
    }

    #[inline(always)]
    fn shifted<const SHIFT: u32>(self, bits: Self::Bits) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_srlv_epi32(bits, _mm512_set1_epi32(SHIFT as i32))) }
    }

    #[inline(always)]
    fn field<const SHIFT: i32>(self, bits: Self::Bits, mask: u32) -> Self::Bits {
        // SAFETY: `self` exists, see above.
        unsafe {
            let count = _mm512_set1_epi32(SHIFT.abs());
            let shifted =
                if SHIFT < 0 { _mm512_sllv_epi32(bits, count) } else { _mm512_srlv_epi32(bits, count) };
            _mm512_and_si512(shifted, _mm512_set1_epi32(mask as i32))
        }
    }

    #[inline(always)]
    fn or(self, a: Self::Bits, b: Self::Bits) -> Self::Bits {
        // SAFETY: `self` exists, see above.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn splat_sums(self, value: i32) -> Self::Sums {
        // SAFETY: `self` exists, see above.
        unsafe { _mm512_set1_epi32(value) }
    }

    #[inline(always)]
    fn dot(self, sums: Self::Sums, weights: Self::Bits, x: u32) -> Self::Sums {
        // SAFETY: `self` exists, see above.
        unsafe {
            if VNNI {
                return _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(x as i32));
            }
            let x = _mm512_set1_epi32(x as i32);
            // As in `dot_8`.
            let (x_even, x_odd) =
                (_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(x)), _mm512_srai_epi16::<8>(x));
            let even = _mm512_madd_epi16(_mm512_and_si512(weights, _mm512_set1_epi16(255)), x_even);
            let odd = _mm512_madd_epi16(_mm512_srli_epi16::<8>(weights), x_odd);
            _mm512_add_epi32(sums, _mm512_add_epi32(even, odd))
        }
    }

    #[inline(always)]
    fn dot_small(self, sums: Self::Sums, weights: Self::Bits, x: u32) -> Self::Sums {
        if VNNI {
            return self.dot(sums, weights, x);
        }
        // SAFETY: `self` exists, see above.
        unsafe { _mm512_add_epi16(sums, _mm512_maddubs_epi16(weights, _mm512_set1_epi32(x as i32))) }
    }

    #[inline(always)]
    fn widen_small(self, sums: Self::Sums) -> Self::Sums {
        // SAFETY: `self` exists, see above.
        if VNNI { sums } else { unsafe { _mm512_madd_epi16(sums, _mm512_set1_epi16(1)) } }
    }

    #[inline(always)]
    fn load_sums(self, from: &[i32; WIDTH]) -> Self::Sums {
        // SAFETY: sixteen elements, see above.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[inline(always)]
    fn add_sums(self, a: Self::Sums, b: Self::Sums) -> Self::Sums {
        // SAFETY: `self` exists, see above.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    fn sums_to_float(self, sums: Self::Sums) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { _mm512_cvtepi32_ps(sums) }
    }

    #[inline(always)]
    fn transpose(self, vectors: [Self::Float; WIDTH]) -> [Self::Float; WIDTH] {
        // Within the quarters of registers: pairs of rows, then fours.
        let (mut pairs, mut fours, mut halves, mut out) = (vectors, vectors, vectors, vectors);
        // SAFETY: `self` exists, see above.
        unsafe {
            for row in (0..WIDTH).step_by(2) {
                pairs[row] = _mm512_unpacklo_ps(vectors[row], vectors[row + 1]);
                pairs[row + 1] = _mm512_unpackhi_ps(vectors[row], vectors[row + 1]);
            }
            for row in (0..WIDTH).step_by(4) {
                for high in 0..2 {
                    let (a, b) = (pairs[row + high], pairs[row + 2 + high]);
                    fours[row + 2 * high] = _mm512_shuffle_ps::<0b01_00_01_00>(a, b);
                    fours[row + 2 * high + 1] = _mm512_shuffle_ps::<0b11_10_11_10>(a, b);
                }
            }
            // Now quarter `q` of `fours[4 * r + c]` is column `4 * q + c` of rows `4 * r ..`: quarters are transposed.
            for column in 0..4 {
                for row in [0, 8] {
                    let (a, b) = (fours[row + column], fours[row + 4 + column]);
                    halves[row + column] = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                    halves[row + 4 + column] = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
                }
                for odd in 0..2 {
                    let (a, b) = (halves[4 * odd + column], halves[8 + 4 * odd + column]);
                    out[4 * odd + column] = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
                    out[8 + 4 * odd + column] = _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b);
                }
            }
        }
        out
    }

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}
