//! Sixteen numbers at a time: the few vector operations that the kernels are made of, once per instruction set.
//!
//! A value of a [`Lanes`] type proves that the processor has its instructions, because only `detect` makes one. Kernels
//! are generic over it, marked `#[inline(always)]`, and entered through [`Lanes::run`], which compiles them with those
//! instructions switched on.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::Neon;
#[cfg(target_arch = "x86_64")]
pub(crate) use amx::Amx;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

/// Lanes of a vector, and rows of a panel.
pub(crate) const WIDTH: usize = 16;

/// A task that can be compiled for any instruction set. `run` must be `#[inline(always)]`.
pub(crate) trait Task {
    /// The result of the task.
    type Output;

    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// An instruction set.
pub(crate) trait Lanes: Copy {
    /// Sixteen f32.
    type Float: Copy;
    /// Sixteen u32.
    type Bits: Copy;
    /// Sixteen i32; of products of small bytes thirty-two i16 if [`Self::IN_PAIRS`].
    type Sums: Copy;

    /// Rows of activations a kernel multiplies at once with dense weights: as many sums as fit the registers.
    const ROWS: usize;
    /// Rows of activations a kernel multiplies at once with quantised weights, whose decoding takes registers too.
    const ROWS_DECODING: usize;

    /// Rows of activations a kernel multiplies at once with integer weights, which takes two registers of sums for each row.
    const ROWS_INTEGERS: usize;
    /// Whether many rows are multiplied with integers that have been unpacked first. Where [`Self::ROWS_INTEGERS`] is large, as many rows
    /// share the work anyway.
    const UNPACKS: bool = true;
    /// What [`Self::dot`] subtracts from each byte of weights, unless they are small: 128 where the processor multiplies signed
    /// bytes only.
    const DOT_BIAS: i32 = 0;
    /// Whether [`Self::dot_small`] adds up two products, in i16: the first two bytes of a word and the last two have sums of their own.
    const IN_PAIRS: bool = false;

    /// Runs a task compiled for this instruction set.
    fn run<T: Task>(self, task: T) -> T::Output;

    fn splat(self, value: f32) -> Self::Float;
    fn load(self, from: &[f32; WIDTH]) -> Self::Float;
    fn load_f16(self, from: &[u16; WIDTH]) -> Self::Float;
    fn load_bf16(self, from: &[u16; WIDTH]) -> Self::Float;
    fn load_u8(self, from: &[u8; WIDTH]) -> Self::Float;
    fn load_i8(self, from: &[i8; WIDTH]) -> Self::Float;
    /// Words of four bytes: vector `c` has word `c` of each of sixteen rows.
    fn transpose_words(self, rows: [&[i8; WIDTH]; WIDTH]) -> [Self::Bits; 4];
    /// Byte `3 - SHIFT / 8` of each word, which is signed, as a number.
    fn signed_byte<const SHIFT: u32>(self, words: Self::Bits) -> Self::Float;
    fn load_bits(self, from: &[u32; WIDTH]) -> Self::Bits;
    fn store_bits(self, bits: Self::Bits, to: &mut [u32; WIDTH]);
    fn store(self, value: Self::Float, to: &mut [f32; WIDTH]);
    fn mul(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a * b + c`, rounded once where the processor can.
    fn mul_add(self, a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    /// `bits & mask` as a number. The mask leaves bit 31 out: the conversion is a signed one.
    fn masked(self, bits: Self::Bits, mask: u32) -> Self::Float;
    /// `bits >> SHIFT` as a number. `SHIFT` is not 0, for the same reason.
    fn shifted<const SHIFT: u32>(self, bits: Self::Bits) -> Self::Float;
    /// `(bits >> SHIFT) & mask`, or `(bits << -SHIFT) & mask`.
    fn field<const SHIFT: i32>(self, bits: Self::Bits, mask: u32) -> Self::Bits;
    fn or(self, a: Self::Bits, b: Self::Bits) -> Self::Bits;
    fn splat_sums(self, value: i32) -> Self::Sums;
    /// Adds to each sum the products of the four unsigned bytes of `weights`, less [`Self::DOT_BIAS`], and the four signed bytes of
    /// `x`. Sums wrap around.
    fn dot(self, sums: Self::Sums, weights: Self::Bits, x: u32) -> Self::Sums;
    /// As [`Self::dot`], for bytes of weights below 128, from which nothing is subtracted. Sums are of 16 bits if [`Self::IN_PAIRS`]:
    /// two for each of the others.
    #[inline(always)]
    fn dot_small(self, sums: Self::Sums, weights: Self::Bits, x: u32) -> Self::Sums {
        const { assert!(Self::DOT_BIAS == 0 && !Self::IN_PAIRS) };
        self.dot(sums, weights, x)
    }
    /// The sums of 32 bits, from those of [`Self::dot_small`].
    #[inline(always)]
    fn widen_small(self, sums: Self::Sums) -> Self::Sums {
        const { assert!(!Self::IN_PAIRS) };
        sums
    }
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for the sums of AMX"))]
    fn load_sums(self, from: &[i32; WIDTH]) -> Self::Sums;
    /// The sums wrap around.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for the sums of AMX"))]
    fn add_sums(self, a: Self::Sums, b: Self::Sums) -> Self::Sums;
    fn sums_to_float(self, sums: Self::Sums) -> Self::Float;
    /// Sixteen vectors whose lane `i` of vector `j` is lane `j` of vector `i`.
    fn transpose(self, vectors: [Self::Float; WIDTH]) -> [Self::Float; WIDTH];
    /// Prefetches a cache line; any address is allowed.
    fn prefetch(self, address: *const u8);
}

/// The instruction sets that kernels are compiled for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum InstructionSet {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2<false>),
    #[cfg(target_arch = "x86_64")]
    AvxVnni(Avx2<true>),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512<false>),
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512<true>),
    /// As [`Self::Avx512Vnni`], and tiles for the integers of many rows.
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon<false, false>),
    #[cfg(target_arch = "aarch64")]
    NeonDotprod(Neon<true, false>),
    #[cfg(target_arch = "aarch64")]
    NeonI8mm(Neon<true, true>),
}

/// How an instruction set multiplies integers.
#[derive(Clone, Copy)]
pub(crate) struct Dots {
    /// [`Lanes::ROWS_INTEGERS`].
    pub(crate) rows: usize,
    /// [`Lanes::DOT_BIAS`].
    pub(crate) bias: i32,
    /// [`Lanes::IN_PAIRS`].
    pub(crate) in_pairs: bool,
}

impl InstructionSet {
    /// Every set that this processor has, the best last.
    pub(crate) fn available() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let more = [
            Avx2::detect().map(Self::Avx2),
            Avx2::detect().map(Self::AvxVnni),
            Avx512::detect().map(Self::Avx512),
            Avx512::detect().map(Self::Avx512Vnni),
            Amx::detect().map(Self::Amx),
        ];
        #[cfg(target_arch = "aarch64")]
        let more = [
            Neon::detect().map(Self::Neon),
            Neon::detect().map(Self::NeonDotprod),
            Neon::detect().map(Self::NeonI8mm),
        ];
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let more = [];
        [Some(Self::Portable)].into_iter().chain(more).flatten()
    }

    /// The fastest set that this processor has.
    pub(crate) fn best() -> Self {
        Self::available().last().unwrap_or(Self::Portable)
    }

    /// How this set multiplies integers.
    pub(crate) fn dots(self) -> Dots {
        struct Find;
        impl Task for Find {
            type Output = Dots;

            #[inline(always)]
            fn run<L: Lanes>(self, _: L) -> Dots {
                Dots { rows: L::ROWS_INTEGERS, bias: L::DOT_BIAS, in_pairs: L::IN_PAIRS }
            }
        }
        self.run(Find)
    }

    /// Runs a task that multiplies no integers, so that it need not be compiled for the instructions that do.
    pub(crate) fn run_floats<T: Task>(self, task: T) -> T::Output {
        match self {
            Self::Portable => Portable.run(task),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(lanes) => lanes.run(task),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni(lanes) => lanes.floats().run(task),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(lanes) => lanes.run(task),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(lanes) => lanes.floats().run(task),
            #[cfg(target_arch = "x86_64")]
            Self::Amx(amx) => amx.lanes().floats().run(task),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(lanes) => lanes.run(task),
            #[cfg(target_arch = "aarch64")]
            Self::NeonDotprod(lanes) => lanes.floats().run(task),
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm(lanes) => lanes.floats().run(task),
        }
    }

    /// Runs a task compiled for this set.
    pub(crate) fn run<T: Task>(self, task: T) -> T::Output {
        match self {
            Self::Portable => Portable.run(task),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(lanes) => lanes.run(task),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni(lanes) => lanes.run(task),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(lanes) => lanes.run(task),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni(lanes) => lanes.run(task),
            #[cfg(target_arch = "x86_64")]
            Self::Amx(amx) => amx.lanes().run(task),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(lanes) => lanes.run(task),
            #[cfg(target_arch = "aarch64")]
            Self::NeonDotprod(lanes) => lanes.run(task),
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm(lanes) => lanes.run(task),
        }
    }
}

/// Plain Rust, for every processor; the compiler vectorises it for the target's baseline (SSE2, NEON).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

/// Whether the baseline has a fused multiply-add; where it has not, `f32::mul_add` is a slow library call.
const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

impl Lanes for Portable {
    type Float = [f32; WIDTH];
    type Bits = [u32; WIDTH];
    type Sums = [i32; WIDTH];

    // Of 16 (x86-64) or 32 (aarch64) registers of four lanes.
    const ROWS: usize = if cfg!(target_arch = "aarch64") { 4 } else { 2 };
    const ROWS_DECODING: usize = Self::ROWS;
    const ROWS_INTEGERS: usize = Self::ROWS;

    #[inline(always)]
    fn run<T: Task>(self, task: T) -> T::Output {
        task.run(self)
    }

    #[inline(always)]
    fn splat(self, value: f32) -> [f32; WIDTH] {
        [value; WIDTH]
    }

    #[inline(always)]
    fn load(self, from: &[f32; WIDTH]) -> [f32; WIDTH] {
        *from
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; WIDTH]) -> [f32; WIDTH] {
        from.map(widen_f16)
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u16; WIDTH]) -> [f32; WIDTH] {
        from.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    fn load_u8(self, from: &[u8; WIDTH]) -> [f32; WIDTH] {
        from.map(f32::from)
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; WIDTH]) -> [f32; WIDTH] {
        from.map(f32::from)
    }

    #[inline(always)]
    fn transpose_words(self, rows: [&[i8; WIDTH]; WIDTH]) -> [[u32; WIDTH]; 4] {
        let mut out = [[0; WIDTH]; 4];
        for (lane, row) in rows.into_iter().enumerate() {
            for (word, bytes) in row.as_chunks::<4>().0.iter().enumerate() {
                out[word][lane] = u32::from_le_bytes(bytes.map(|byte| byte as u8));
            }
        }
        out
    }

    #[inline(always)]
    fn signed_byte<const SHIFT: u32>(self, words: [u32; WIDTH]) -> [f32; WIDTH] {
        words.map(|word| ((word << SHIFT) as i32 >> 24) as f32)
    }

    #[inline(always)]
    fn load_bits(self, from: &[u32; WIDTH]) -> [u32; WIDTH] {
        *from
    }

    #[inline(always)]
    fn store_bits(self, bits: [u32; WIDTH], to: &mut [u32; WIDTH]) {
        *to = bits;
    }

    #[inline(always)]
    fn store(self, value: [f32; WIDTH], to: &mut [f32; WIDTH]) {
        *to = value;
    }

    #[inline(always)]
    fn mul(self, mut a: [f32; WIDTH], b: [f32; WIDTH]) -> [f32; WIDTH] {
        for (a, b) in a.iter_mut().zip(b) {
            *a *= b;
        }
        a
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; WIDTH], b: [f32; WIDTH], mut c: [f32; WIDTH]) -> [f32; WIDTH] {
        for ((a, b), c) in a.into_iter().zip(b).zip(&mut c) {
            *c = if FUSED { a.mul_add(b, *c) } else { a * b + *c };
        }
        c
    }

    #[inline(always)]
    fn masked(self, bits: [u32; WIDTH], mask: u32) -> [f32; WIDTH] {
        bits.map(|bits| (bits & mask) as i32 as f32)
    }

    #[inline(always)]
    fn shifted<const SHIFT: u32>(self, bits: [u32; WIDTH]) -> [f32; WIDTH] {
        bits.map(|bits| (bits >> SHIFT) as i32 as f32)
    }

    #[inline(always)]
    fn field<const SHIFT: i32>(self, bits: [u32; WIDTH], mask: u32) -> [u32; WIDTH] {
        bits.map(|bits| (if SHIFT < 0 { bits << -SHIFT } else { bits >> SHIFT }) & mask)
    }

    #[inline(always)]
    fn or(self, mut a: [u32; WIDTH], b: [u32; WIDTH]) -> [u32; WIDTH] {
        for (a, b) in a.iter_mut().zip(b) {
            *a |= b;
        }
        a
    }

    #[inline(always)]
    fn splat_sums(self, value: i32) -> [i32; WIDTH] {
        [value; WIDTH]
    }

    #[inline(always)]
    fn dot(self, mut sums: [i32; WIDTH], weights: [u32; WIDTH], x: u32) -> [i32; WIDTH] {
        let x = x.to_le_bytes().map(|byte| i32::from(byte as i8));
        for (sum, weight) in sums.iter_mut().zip(weights) {
            let q = |index: u32| (weight >> (8 * index) & 255) as i32;
            *sum = sum.wrapping_add(q(0) * x[0] + q(1) * x[1] + q(2) * x[2] + q(3) * x[3]);
        }
        sums
    }

    #[inline(always)]
    fn load_sums(self, from: &[i32; WIDTH]) -> [i32; WIDTH] {
        *from
    }

    #[inline(always)]
    fn add_sums(self, mut a: [i32; WIDTH], b: [i32; WIDTH]) -> [i32; WIDTH] {
        for (a, b) in a.iter_mut().zip(b) {
            *a = a.wrapping_add(b);
        }
        a
    }

    #[inline(always)]
    fn sums_to_float(self, sums: [i32; WIDTH]) -> [f32; WIDTH] {
        sums.map(|sum| sum as f32)
    }

    #[inline(always)]
    fn transpose(self, vectors: [[f32; WIDTH]; WIDTH]) -> [[f32; WIDTH]; WIDTH] {
        let mut out = [[0.0; WIDTH]; WIDTH];
        for (i, vector) in vectors.iter().enumerate() {
            for (j, value) in vector.iter().enumerate() {
                out[j][i] = *value;
            }
        }
        out
    }

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}

/// The value of an f16, without branches, so that it vectorises.
#[inline(always)]
fn widen_f16(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7FFF) << 13;
    // With the bits moved to an f32's exponent and fraction, the exponent is too small by the difference of the
    // biases, 112; a multiplication corrects it exactly, also for subnormal numbers.
    let finite = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let infinite_or_nan = if bits & 0x7C00 == 0x7C00 { 0x7F80_0000 } else { 0 };
    f32::from_bits(finite | infinite_or_nan | u32::from(bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Transpose([[f32; WIDTH]; WIDTH]);

    impl Task for Transpose {
        type Output = [[f32; WIDTH]; WIDTH];

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> Self::Output {
            let mut vectors = [lanes.splat(0.0); WIDTH];
            for (vector, numbers) in vectors.iter_mut().zip(&self.0) {
                *vector = lanes.load(numbers);
            }
            let mut out = [[0.0; WIDTH]; WIDTH];
            for (out, vector) in out.iter_mut().zip(lanes.transpose(vectors)) {
                lanes.store(vector, out);
            }
            out
        }
    }

    #[test]
    fn every_set_transposes() {
        let numbers = std::array::from_fn(|i| std::array::from_fn(|j| (i * WIDTH + j) as f32));
        for instructions in InstructionSet::available() {
            let found = instructions.run(Transpose(numbers));
            for (i, vector) in found.iter().enumerate() {
                for (j, value) in vector.iter().enumerate() {
                    assert_eq!(*value, numbers[j][i], "{instructions:?}, lane {j} of vector {i}");
                }
            }
        }
    }

    struct TransposeBytes([[i8; WIDTH]; WIDTH]);

    impl Task for TransposeBytes {
        type Output = [[f32; WIDTH]; WIDTH];

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> Self::Output {
            let mut out = [[0.0; WIDTH]; WIDTH];
            let words = lanes.transpose_words(self.0.each_ref());
            for (word, out) in words.into_iter().zip(out.as_chunks_mut::<4>().0) {
                lanes.store(lanes.signed_byte::<24>(word), &mut out[0]);
                lanes.store(lanes.signed_byte::<16>(word), &mut out[1]);
                lanes.store(lanes.signed_byte::<8>(word), &mut out[2]);
                lanes.store(lanes.signed_byte::<0>(word), &mut out[3]);
            }
            out
        }
    }

    #[test]
    fn every_set_transposes_bytes() {
        let bytes: [[i8; WIDTH]; WIDTH] =
            std::array::from_fn(|i| std::array::from_fn(|j| (i * WIDTH + j) as u8 as i8));
        for instructions in InstructionSet::available() {
            let found = instructions.run(TransposeBytes(bytes));
            for (i, vector) in found.iter().enumerate() {
                for (j, value) in vector.iter().enumerate() {
                    assert_eq!(*value, f32::from(bytes[j][i]), "{instructions:?}, lane {j} of vector {i}");
                }
            }
        }
    }

    struct Dot<const SMALL: bool> {
        weights: [u32; WIDTH],
        x: u32,
    }

    impl<const SMALL: bool> Task for Dot<SMALL> {
        type Output = ([f32; WIDTH], i32);

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> Self::Output {
            let weights = lanes.load_bits(&self.weights);
            let sums = if SMALL {
                lanes.widen_small(lanes.dot_small(lanes.splat_sums(5), weights, self.x))
            } else {
                lanes.dot(lanes.splat_sums(5), weights, self.x)
            };
            let mut out = [0.0; WIDTH];
            lanes.store(lanes.sums_to_float(sums), &mut out);
            (out, if SMALL { 0 } else { L::DOT_BIAS })
        }
    }

    /// All pairs of a byte of weights and one of activations, beside the bytes with the largest products.
    #[test]
    fn every_set_multiplies_bytes_exactly() {
        fn check<const SMALL: bool>(first: u8, byte: i8, largest: u8) {
            let bytes: [[u8; 4]; WIDTH] =
                std::array::from_fn(|lane| [first + lane as u8, 0, largest, first + lane as u8]);
            for x in [[byte, 3, byte, byte], [byte, -128, byte, 1], [byte, 127, -128, -128]] {
                for instructions in InstructionSet::available() {
                    let weights = bytes.map(u32::from_le_bytes);
                    let task = Dot::<SMALL> { weights, x: u32::from_le_bytes(x.map(|byte| byte as u8)) };
                    let (found, bias) = instructions.run(task);
                    for (found, bytes) in found.iter().zip(bytes) {
                        let products =
                            bytes.iter().zip(x).map(|(q, x)| (i32::from(*q) - bias) * i32::from(x));
                        let expected = 5 + products.sum::<i32>();
                        assert_eq!(*found, expected as f32, "{instructions:?}: {bytes:?} by {x:?}");
                    }
                }
            }
        }
        for byte in i8::MIN..=i8::MAX {
            for first in (0..=u8::MAX).step_by(WIDTH) {
                check::<false>(first, byte, 255);
                if first < 128 {
                    check::<true>(first, byte, 127);
                }
            }
        }
    }

    struct Convert<'a>(&'a [u16; WIDTH], &'a [u8; WIDTH], [u32; WIDTH]);

    impl Task for Convert<'_> {
        type Output = [[f32; WIDTH]; 9];

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> Self::Output {
            let Self(halves, bytes, bits) = self;
            let bits = lanes.load_bits(&bits);
            let vectors = [
                lanes.load_f16(halves),
                lanes.load_bf16(halves),
                lanes.load_u8(bytes),
                lanes.load_i8(bytemuck::cast_ref(bytes)),
                lanes.masked(bits, 0x7F00_F00F),
                lanes.shifted::<7>(bits),
                lanes.masked(lanes.field::<4>(bits, 0x0F0F_0F0F), 0x7FFF_FFFF),
                lanes.masked(lanes.field::<-3>(bits, 0x0707_0707), 0x7FFF_FFFF),
                lanes.masked(lanes.or(bits, lanes.field::<0>(bits, 0)), 0x7FFF_FFFF),
            ];
            let mut out = [[0.0; WIDTH]; 9];
            for (out, vector) in out.iter_mut().zip(vectors) {
                lanes.store(vector, out);
            }
            out
        }
    }

    /// Every value of 16 bits, beside bytes and words made of it.
    #[test]
    fn every_set_converts_as_plain_rust() {
        for first in (0..=u16::MAX).step_by(WIDTH) {
            let halves: [u16; WIDTH] = std::array::from_fn(|lane| first + lane as u16);
            let bytes = halves.map(|bits| (bits ^ bits >> 8) as u8);
            let bits = halves.map(|bits| u32::from(bits).wrapping_mul(0x9E37_79B1));
            let expected = InstructionSet::Portable.run(Convert(&halves, &bytes, bits));
            for instructions in InstructionSet::available() {
                let found = instructions.run(Convert(&halves, &bytes, bits));
                for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                    let equal = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                    assert!(equal, "{instructions:?}: {found} for {expected}, from {first:#x}");
                }
            }
        }
    }

    #[test]
    fn every_f16_widens_to_its_value() {
        for bits in 0..=u16::MAX {
            let (found, expected) = (widen_f16(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(),
                "{bits:#x}"
            );
        }
    }
}
