//! Squares of numbers and of words of bytes, whose rows become columns.

use crate::lanes::WIDTH;
use std::arch::x86_64::*;

/// Transposes a square of eight by eight.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn transpose_8(rows: [__m256; 8]) -> [__m256; 8] {
    let (mut pairs, mut fours, mut out) = (rows, rows, rows);
    // SAFETY: by the caller's promise.
    unsafe {
        for row in (0..8).step_by(2) {
            pairs[row] = _mm256_unpacklo_ps(rows[row], rows[row + 1]);
            pairs[row + 1] = _mm256_unpackhi_ps(rows[row], rows[row + 1]);
        }
        for row in [0, 4] {
            for high in 0..2 {
                let (a, b) = (pairs[row + high], pairs[row + 2 + high]);
                fours[row + 2 * high] = _mm256_shuffle_ps::<0b01_00_01_00>(a, b);
                fours[row + 2 * high + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(a, b);
            }
        }
        for column in 0..4 {
            let (a, b) = (fours[column], fours[4 + column]);
            out[column] = _mm256_permute2f128_ps::<0x20>(a, b);
            out[4 + column] = _mm256_permute2f128_ps::<0x31>(a, b);
        }
    }
    out
}

/// Byte `3 - SHIFT / 8` of each word, which is signed, as a number.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn signed_byte_8<const SHIFT: u32>(words: __m256i) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe {
        let shifted = _mm256_sllv_epi32(words, _mm256_set1_epi32(SHIFT as i32));
        _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(shifted))
    }
}

/// Words of four bytes of eight rows from `first` on: vector `c` has word `c` of each row.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn transpose_words_8(rows: &[&[i8; WIDTH]; WIDTH], first: usize) -> [__m256i; 4] {
    // SAFETY: by the caller's promise; a row has sixteen bytes.
    unsafe {
        // The halves of a register have rows that are four apart. No closures: they would not have the instructions.
        let mut registers = [_mm256_setzero_si256(); 4];
        for (index, register) in registers.iter_mut().enumerate() {
            let row = first + index;
            let low = _mm256_castsi128_si256(_mm_loadu_si128(rows[row].as_ptr().cast()));
            *register = _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(rows[row + 4].as_ptr().cast()));
        }
        let [a, b, c, d] = registers;
        let (low_ab, high_ab) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (low_cd, high_cd) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(low_ab, low_cd),
            _mm256_unpackhi_epi64(low_ab, low_cd),
            _mm256_unpacklo_epi64(high_ab, high_cd),
            _mm256_unpackhi_epi64(high_ab, high_cd),
        ]
    }
}

/// Words of four bytes of sixteen rows: vector `c` has word `c` of each row.
///
/// # Safety
/// The processor has AVX-512 F.
#[inline(always)]
pub(super) unsafe fn transpose_words(rows: &[&[i8; WIDTH]; WIDTH]) -> [__m512i; 4] {
    // SAFETY: by the caller's promise; a row has sixteen bytes.
    unsafe {
        // The quarters of a register have rows that are four apart. No closures, as above.
        let mut registers = [_mm512_setzero_si512(); 4];
        for (row, register) in registers.iter_mut().enumerate() {
            let one = _mm512_castsi128_si512(_mm_loadu_si128(rows[row].as_ptr().cast()));
            let two = _mm512_inserti32x4::<1>(one, _mm_loadu_si128(rows[row + 4].as_ptr().cast()));
            let three = _mm512_inserti32x4::<2>(two, _mm_loadu_si128(rows[row + 8].as_ptr().cast()));
            *register = _mm512_inserti32x4::<3>(three, _mm_loadu_si128(rows[row + 12].as_ptr().cast()));
        }
        let [a, b, c, d] = registers;
        let (low_ab, high_ab) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (low_cd, high_cd) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(low_ab, low_cd),
            _mm512_unpackhi_epi64(low_ab, low_cd),
            _mm512_unpacklo_epi64(high_ab, high_cd),
            _mm512_unpackhi_epi64(high_ab, high_cd),
        ]
    }
}
