//! AArch64: NEON (four registers of four lanes).

use super::{Lanes, Task, WIDTH};
use std::arch::{aarch64::*, asm, is_aarch64_feature_detected};

/// NEON, which every AArch64 processor has that runs an operating system. With `DOTPROD` also `FEAT_DotProd`, which multiplies
/// signed bytes; with `I8MM` also `FEAT_I8MM`, which multiplies unsigned bytes with signed ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon<const DOTPROD: bool, const I8MM: bool>(());

impl<const DOTPROD: bool, const I8MM: bool> Neon<DOTPROD, I8MM> {
    /// Proof that this processor has the instructions, if it has.
    pub(crate) fn detect() -> Option<Self> {
        let found = is_aarch64_feature_detected!("neon")
            && (!DOTPROD || is_aarch64_feature_detected!("dotprod"))
            && (!I8MM || is_aarch64_feature_detected!("i8mm"));
        found.then_some(Self(()))
    }

    /// The same set without the multiplication of bytes.
    pub(super) fn floats(self) -> Neon<false, false> {
        Neon(())
    }
}

/// A value for each of the four registers of a vector.
macro_rules! registers {
    (|$index:ident| $value:expr) => {
        [
            {
                let $index = 0;
                $value
            },
            {
                let $index = 1;
                $value
            },
            {
                let $index = 2;
                $value
            },
            {
                let $index = 3;
                $value
            },
        ]
    };
}

/// Adds to each sum the products of four signed bytes of `weights` and `x`. The standard library's function is not stable yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot_signed(mut sums: int32x4_t, weights: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction reads and writes these registers only, and the function enables its feature.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {weights:v}.16b, {x:v}.16b",
            sums = inout(vreg) sums, weights = in(vreg) weights, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// Adds to each sum the products of four unsigned bytes of `weights` and four signed bytes of `x`. The standard library's function
/// is not stable yet.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn dot_mixed(mut sums: int32x4_t, weights: uint8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction reads and writes these registers only, and the function enables its feature.
    unsafe {
        asm!(
            "usdot {sums:v}.4s, {weights:v}.16b, {x:v}.16b",
            sums = inout(vreg) sums, weights = in(vreg) weights, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// As [`dot_signed`], with the instructions of every processor.
#[inline]
#[target_feature(enable = "neon")]
fn dot_pairs(sums: int32x4_t, weights: int8x16_t, x: int8x16_t) -> int32x4_t {
    let low = vmull_s8(vget_low_s8(weights), vget_low_s8(x));
    let high = vmull_high_s8(weights, x);
    vaddq_s32(sums, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))
}

/// As [`dot_pairs`], for weights that are not -128.
#[inline]
#[target_feature(enable = "neon")]
fn dot_small_pairs(sums: int32x4_t, weights: int8x16_t, x: int8x16_t) -> int32x4_t {
    // Two products of at most 127 * 128 fit 16 bits.
    let low = vmull_s8(vget_low_s8(weights), vget_low_s8(x));
    vpadalq_s16(sums, vpaddq_s16(low, vmull_high_s8(weights, x)))
}

// SAFETY of every block below: `self` exists, so the processor has the instructions; loads and stores go through
// references to arrays of exactly the length that is read or written, and need no alignment.

impl<const DOTPROD: bool, const I8MM: bool> Lanes for Neon<DOTPROD, I8MM> {
    type Float = [float32x4_t; 4];
    type Bits = [uint32x4_t; 4];
    type Sums = [int32x4_t; 4];

    // 6 rows x 4 registers of sums, 4 of weights, 1 of activations: 29 of 32.
    const ROWS: usize = 6;
    // 4 rows x 4 registers of sums, 4 of scales, 4 of offsets, 4 of weights, 1 of activations, 1 of a mask: 30 of 32.
    const ROWS_DECODING: usize = 4;
    // 2 rows x 4 registers of f32 and of integers, 4 of weights, 4 of scales, 1 of activations, 2 of constants: 27 of 32.
    const ROWS_INTEGERS: usize = 2;
    const DOT_BIAS: i32 = if I8MM { 0 } else { 128 };

    #[inline(always)]
    fn run<T: Task>(self, task: T) -> T::Output {
        #[target_feature(enable = "neon")]
        fn enter<T: Task, L: Lanes>(lanes: L, task: T) -> T::Output {
            task.run(lanes)
        }
        #[target_feature(enable = "neon,dotprod")]
        fn enter_dotprod<T: Task, L: Lanes>(lanes: L, task: T) -> T::Output {
            task.run(lanes)
        }
        #[target_feature(enable = "neon,dotprod,i8mm")]
        fn enter_i8mm<T: Task, L: Lanes>(lanes: L, task: T) -> T::Output {
            task.run(lanes)
        }
        // SAFETY: `self` exists, see above.
        unsafe {
            match (DOTPROD, I8MM) {
                (true, true) => enter_i8mm(self, task),
                (true, false) => enter_dotprod(self, task),
                _ => enter(self, task),
            }
        }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { [vdupq_n_f32(value); 4] }
    }

    #[inline(always)]
    fn load(self, from: &[f32; WIDTH]) -> Self::Float {
        // SAFETY: four elements each, see above.
        unsafe { registers!(|index| vld1q_f32(from[4 * index..][..4].as_ptr())) }
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; WIDTH]) -> Self::Float {
        // SAFETY: four elements each, see above.
        unsafe {
            registers!(|index| {
                vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from[4 * index..][..4].as_ptr())))
            })
        }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; WIDTH]) -> Self::Float {
        // SAFETY: four elements each, see above.
        unsafe {
            registers!(|index| {
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from[4 * index..][..4].as_ptr())))
            })
        }
    }

    #[inline(always)]
    fn load_u8(self, from: &[u8; WIDTH]) -> Self::Float {
        // SAFETY: sixteen elements, see above.
        unsafe {
            let bytes = vld1q_u8(from.as_ptr());
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
            [
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
                vcvtq_f32_u32(vmovl_high_u16(low)),
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
                vcvtq_f32_u32(vmovl_high_u16(high)),
            ]
        }
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; WIDTH]) -> Self::Float {
        // SAFETY: sixteen elements, see above.
        unsafe {
            let bytes = vld1q_s8(from.as_ptr());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            ]
        }
    }

    #[inline(always)]
    fn transpose_words(self, rows: [&[i8; WIDTH]; WIDTH]) -> [Self::Bits; 4] {
        let mut out = [self.load_bits(&[0; WIDTH]); 4];
        for quarter in 0..4 {
            // SAFETY: `self` exists, and a row has sixteen bytes.
            unsafe {
                let square = registers!(|index| {
                    vreinterpretq_f32_s8(vld1q_s8(rows[4 * quarter + index].as_ptr()))
                });
                for (out, words) in out.iter_mut().zip(transpose_4(square)) {
                    out[quarter] = vreinterpretq_u32_f32(words);
                }
            }
        }
        out
    }

    #[inline(always)]
    fn signed_byte<const SHIFT: u32>(self, words: Self::Bits) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe {
            registers!(|index| {
                let shifted = vshlq_s32(vreinterpretq_s32_u32(words[index]), vdupq_n_s32(SHIFT as i32));
                vcvtq_f32_s32(vshrq_n_s32::<24>(shifted))
            })
        }
    }

    #[inline(always)]
    fn load_bits(self, from: &[u32; WIDTH]) -> Self::Bits {
        // SAFETY: four elements each, see above.
        unsafe { registers!(|index| vld1q_u32(from[4 * index..][..4].as_ptr())) }
    }

    #[inline(always)]
    fn store_bits(self, bits: Self::Bits, to: &mut [u32; WIDTH]) {
        // SAFETY: four elements each, see above.
        unsafe { registers!(|index| vst1q_u32(to[4 * index..][..4].as_mut_ptr(), bits[index])) };
    }

    #[inline(always)]
    fn store(self, value: Self::Float, to: &mut [f32; WIDTH]) {
        // SAFETY: four elements each, see above.
        unsafe { registers!(|index| vst1q_f32(to[4 * index..][..4].as_mut_ptr(), value[index])) };
    }

    #[inline(always)]
    fn mul(self, a: Self::Float, b: Self::Float) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { registers!(|index| vmulq_f32(a[index], b[index])) }
    }

    #[inline(always)]
    fn mul_add(self, a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { registers!(|index| vfmaq_f32(c[index], a[index], b[index])) }
    }

    #[inline(always)]
    fn masked(self, bits: Self::Bits, mask: u32) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe {
            let mask = vdupq_n_u32(mask);
            registers!(|index| vcvtq_f32_u32(vandq_u32(bits[index], mask)))
        }
    }

    #[inline(always)]
    fn shifted<const SHIFT: u32>(self, bits: Self::Bits) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe {
            // A shift to the left by a negative count is one to the right.
            let count = vdupq_n_s32(-(SHIFT as i32));
            registers!(|index| vcvtq_f32_u32(vshlq_u32(bits[index], count)))
        }
    }

    #[inline(always)]
    fn field<const SHIFT: i32>(self, bits: Self::Bits, mask: u32) -> Self::Bits {
        // SAFETY: `self` exists, see above.
        unsafe {
            let (count, mask) = (vdupq_n_s32(-SHIFT), vdupq_n_u32(mask));
            registers!(|index| vandq_u32(vshlq_u32(bits[index], count), mask))
        }
    }

    #[inline(always)]
    fn or(self, a: Self::Bits, b: Self::Bits) -> Self::Bits {
        // SAFETY: `self` exists, see above.
        unsafe { registers!(|index| vorrq_u32(a[index], b[index])) }
    }

    #[inline(always)]
    fn splat_sums(self, value: i32) -> Self::Sums {
        // SAFETY: `self` exists, see above.
        unsafe { [vdupq_n_s32(value); 4] }
    }

    #[inline(always)]
    fn dot(self, sums: Self::Sums, weights: Self::Bits, x: u32) -> Self::Sums {
        // SAFETY: `self` exists, see above.
        unsafe {
            let x = vreinterpretq_s8_u32(vdupq_n_u32(x));
            if I8MM {
                return registers!(|index| dot_mixed(sums[index], vreinterpretq_u8_u32(weights[index]), x));
            }
            // Flipping the upper bit of a byte subtracts the bias.
            let bias = vdupq_n_u32(0x8080_8080);
            let signed = registers!(|index| vreinterpretq_s8_u32(veorq_u32(weights[index], bias)));
            if DOTPROD {
                registers!(|index| dot_signed(sums[index], signed[index], x))
            } else {
                registers!(|index| dot_pairs(sums[index], signed[index], x))
            }
        }
    }

    #[inline(always)]
    fn dot_small(self, sums: Self::Sums, weights: Self::Bits, x: u32) -> Self::Sums {
        // SAFETY: `self` exists, see above.
        unsafe {
            let x = vreinterpretq_s8_u32(vdupq_n_u32(x));
            // Small bytes are the same signed and unsigned.
            let weights = registers!(|index| vreinterpretq_s8_u32(weights[index]));
            if DOTPROD {
                registers!(|index| dot_signed(sums[index], weights[index], x))
            } else {
                registers!(|index| dot_small_pairs(sums[index], weights[index], x))
            }
        }
    }

    #[inline(always)]
    fn load_sums(self, from: &[i32; WIDTH]) -> Self::Sums {
        // SAFETY: four elements each, see above.
        unsafe { registers!(|index| vld1q_s32(from[4 * index..][..4].as_ptr())) }
    }

    #[inline(always)]
    fn add_sums(self, a: Self::Sums, b: Self::Sums) -> Self::Sums {
        // SAFETY: `self` exists, see above.
        unsafe { registers!(|index| vaddq_s32(a[index], b[index])) }
    }

    #[inline(always)]
    fn sums_to_float(self, sums: Self::Sums) -> Self::Float {
        // SAFETY: `self` exists, see above.
        unsafe { registers!(|index| vcvtq_f32_s32(sums[index])) }
    }

    #[inline(always)]
    fn transpose(self, vectors: [Self::Float; WIDTH]) -> [Self::Float; WIDTH] {
        // Sixteen squares of four: those off the diagonal change places.
        let mut out = vectors;
        for row in 0..4 {
            for column in 0..4 {
                let square = registers!(|index| vectors[4 * row + index][column]);
                // SAFETY: `self` exists, see above.
                let square = unsafe { transpose_4(square) };
                for (index, register) in square.into_iter().enumerate() {
                    out[4 * column + index][row] = register;
                }
            }
        }
        out
    }

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // SAFETY: a prefetch never faults.
        unsafe {
            asm!("prfm pldl1keep, [{}]", in(reg) address, options(nomem, nostack, preserves_flags));
        }
    }
}

/// Transposes a square of four by four.
#[inline]
#[target_feature(enable = "neon")]
fn transpose_4(rows: [float32x4_t; 4]) -> [float32x4_t; 4] {
    let [a, b, c, d] = rows;
    // Squares of two by two within pairs of rows; then whole pairs change places.
    let upper_even = vreinterpretq_f64_f32(vtrn1q_f32(a, b));
    let upper_odd = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
    let lower_even = vreinterpretq_f64_f32(vtrn1q_f32(c, d));
    let lower_odd = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
    [
        vreinterpretq_f32_f64(vtrn1q_f64(upper_even, lower_even)),
        vreinterpretq_f32_f64(vtrn1q_f64(upper_odd, lower_odd)),
        vreinterpretq_f32_f64(vtrn2q_f64(upper_even, lower_even)),
        vreinterpretq_f32_f64(vtrn2q_f64(upper_odd, lower_odd)),
    ]
}
