//! The layout of packed weights: panels of sixteen rows, interleaved.
//!
//! Sixteen rows of a matrix become one panel, a run of [`Block`]s along the row. In a block every vector holds one number per
//! row: lane `r` is row `r`. So one load yields the scales of sixteen rows, sums need no reduction across lanes, and a panel is
//! read from front to back. Formats with their own block type in the table below take exactly the bytes of the sixteen file
//! blocks they were made from, except that factors of `q4_k` take a byte each.
//!
//! | format | block of a panel | elements of a row |
//! |---|---|---|
//! | `f32`, `f16`, `bf16` | 16 numbers | 1 |
//! | `q4_0` | 16 scales; 4 x 16 words of 8 nibbles | 32 |
//! | `q4_1` | 16 scales; 16 minima; 4 x 16 words of 8 nibbles | 32 |
//! | `q8_0` | 16 scales; 8 x 16 words of 4 bytes, each plus 128 | 32 |
//! | bytes with a scale for each row | 16 words of 4 bytes in order, each plus 128; scales stand elsewhere | 4 |
//! | `q4_k` | 16 scales; 16 minima; 8 x 16 factors of scales, 8 x 16 of minima, in bytes; 8 x 4 x 16 words of 8 nibbles | 256 |
//! | `q6_k` | 16 scales; 16 x 16 factors in bytes, each plus 128; 16 x 2 x 16 words of 8 nibbles; 16 x 16 words of 16 pairs of bits | 256 |
//! | others, up to 4 bits | 16 scales, 16 offsets, f32; 4 x 16 words of 8 nibbles | 32 |
//! | others, up to 8 bits | 16 scales, 16 offsets, f32; 4 x 16 words of 4 bytes | 16 |
//!
//! The last two hold every format whose elements are `scale * q + offset`; scales of groups that are longer are repeated.
//!
//! Of `n` words of a row, word `w` holds elements `w`, `w + n`, `w + 2n`, .., the first in the lowest bits. So elements come
//! in order if the kernel takes the first of every word, then the second of every word, and so on, and it needs each set of
//! scales only once. An element is extracted from its word by a mask alone, which leaves `q * 2^s`; that converts exactly,
//! and the scale includes the factor `2^-s`. Only the topmost element, which would touch the sign, is shifted down.

mod super_block;

use crate::lanes::{Lanes, WIDTH};
use bytemuck::{Pod, Zeroable};
use dsrun_core::Affine;
use half::{bf16, f16};
pub(super) use super_block::{Q4K, Q6K};

/// A run of elements of sixteen rows.
pub(super) trait Block: Pod + Send + Sync {
    /// Parts of a row with scales of their own.
    const PARTS: usize = 1;
    /// Words of a part of a row.
    const WORDS: usize;
    /// Elements of a word.
    const STEPS: usize;
    /// Elements of a part of a row.
    const PART: usize = Self::WORDS * Self::STEPS;
    /// Elements of a row.
    const LENGTH: usize = Self::PARTS * Self::PART;

    /// The scale and offset of a lane's integers.
    type Scale<L: Lanes>: Copy;

    /// The scales of part `part` of the sixteen rows.
    fn scale<L: Lanes>(&self, lanes: L, part: usize) -> Self::Scale<L>;

    /// The scales for element `step` of a word.
    fn scale_for_step<L: Lanes>(lanes: L, scale: Self::Scale<L>, step: usize) -> Self::Scale<L>;

    /// Element `step` of word `word` of the sixteen rows, of all words of the block. `scale` is [`Self::scale_for_step`] of the
    /// word's part and that step.
    fn weights<L: Lanes>(&self, lanes: L, scale: Self::Scale<L>, word: usize, step: usize) -> L::Float;

    /// The blocks as they are, if there is nothing to decode.
    fn decoded(_: &[Self]) -> Option<&[F32]> {
        None
    }

    /// Element `index` of a row, by the formula of the format.
    fn element(&self, lane: usize, index: usize) -> f32;
}

/// A block that is made of a row's bytes as they are stored.
pub(super) trait FromBytes: Block {
    /// Bytes of a row's block, as they are stored.
    const BYTES: usize = size_of::<Self>() / WIDTH;

    /// Fills one lane from the bytes of a row's block.
    fn set_row(&mut self, lane: usize, bytes: &[u8]);
}

/// A block that is made of integers with their scale and offset.
pub(super) trait FromIntegers: Block {
    /// Fills one lane from the integers of a block.
    fn set_integers(&mut self, lane: usize, integers: &[u8], affine: Affine);
}

/// One element of sixteen rows.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct F32([f32; WIDTH]);

/// One element of sixteen rows.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct F16([u16; WIDTH]);

/// One element of sixteen rows.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct BF16([u16; WIDTH]);

/// 32 elements of sixteen rows.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Q4_0 {
    scales: [u16; WIDTH],
    words: [[u32; WIDTH]; 4],
}

/// 32 elements of sixteen rows.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Q4_1 {
    scales: [u16; WIDTH],
    minima: [u16; WIDTH],
    words: [[u32; WIDTH]; 4],
}

/// 32 elements of sixteen rows.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Q8_0 {
    scales: [u16; WIDTH],
    words: [[u32; WIDTH]; 8],
}

/// 32 elements of sixteen rows, of up to four bits.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Nibbles {
    scales: [f32; WIDTH],
    offsets: [f32; WIDTH],
    words: [[u32; WIDTH]; 4],
}

/// 16 elements of sixteen rows, of up to eight bits.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Bytes {
    scales: [f32; WIDTH],
    offsets: [f32; WIDTH],
    words: [[u32; WIDTH]; 4],
}

/// Four signed bytes of sixteen rows, each plus 128. Scales are the rows' and are not in the block.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct Int8([[u32; WIDTH]; 1]);

/// A block of integers, which are multiplied with quantised activations as they are.
pub(super) trait Integers: Block {
    /// Whether every part of a block has scales of its own.
    const SCALED: bool;
    /// Whether weights are `scale * q + offset` with an offset of their own, rather than `scale * (q - ZERO)`.
    const OFFSET: bool;
    /// Subtracted from every integer, where all weights of this type have the same zero; the offset does not contain it.
    const ZERO: i32;
    /// Whether the offset contains a zero, which may be the same for all blocks of a matrix.
    const OFFSET_HAS_ZERO: bool = false;
    /// The largest integer; the smallest is 0.
    const LARGEST: i32;
    /// Whether integers are small bytes ([`Lanes::dot_small`]). In pairs of bytes, the products of a part with activations of at most 127
    /// then have sums of 16 bits.
    const SMALL: bool = {
        let above = Self::LARGEST - Self::ZERO;
        let size = if above > Self::ZERO { above } else { Self::ZERO };
        assert!(Self::LARGEST > 127 || size * 127 * 2 * Self::DOTS as i32 <= i16::MAX as i32);
        Self::LARGEST <= 127
    };
    /// Whether taking the integers of a part out of their block takes about as long as multiplying them with a row of activations.
    const UNPACKS: bool = false;
    /// Words of activations for a part: of `n` words, word `w` has elements `w`, `w + n`, `w + 2n` and `w + 3n`.
    const DOTS: usize = Self::PART / 4;

    /// The four integers that word `word` of the activations for part `part` is multiplied with, one in each byte.
    fn bytes<L: Lanes>(&self, lanes: L, part: usize, word: usize) -> L::Bits;

    /// The four integers of each word of the activations for these blocks, if they are kept in that order and have no scales.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for the tiles of AMX"))]
    fn as_tiles(_: &[Self]) -> Option<&[[u32; WIDTH]]> {
        None
    }

    /// The scales and offsets of part `part` of the sixteen rows.
    fn affine<L: Lanes>(&self, lanes: L, part: usize) -> (L::Float, L::Float);
}

macro_rules! integers {
    (
        $block:ident, $scaled:literal, $offset:literal, $zero:literal, $largest:literal $(, $has_zero:literal)?,
        |$lanes:ident, $of:ident, $part:ident, $word:ident| $bytes:expr $(, $more:item)?
    ) => {
        impl Integers for $block {
            const SCALED: bool = $scaled;
            const OFFSET: bool = $offset;
            const ZERO: i32 = $zero;
            const LARGEST: i32 = $largest;
            $(const OFFSET_HAS_ZERO: bool = $has_zero;)?

            #[inline(always)]
            fn bytes<L: Lanes>(&self, $lanes: L, $part: usize, $word: usize) -> L::Bits {
                let $of = self;
                $bytes
            }

            $($more)?

            #[inline(always)]
            fn affine<L: Lanes>(&self, lanes: L, part: usize) -> (L::Float, L::Float) {
                let Scaled { scale, offset } = self.scale(lanes, part);
                (scale, offset)
            }
        }
    };
}

integers!(Q4_0, true, false, 8, 15, |lanes, block, _part, word| nibbles(lanes, &block.words, word));
integers!(Q4_1, true, true, 0, 15, |lanes, block, _part, word| nibbles(lanes, &block.words, word));
integers!(Nibbles, true, true, 0, 15, true, |lanes, block, _part, word| nibbles(lanes, &block.words, word));
integers!(Q4K, true, true, 0, 15, |lanes, block, part, word| {
    nibbles(lanes, &block.words[4 * part..], word)
});
integers!(
    Q6K,
    true,
    false,
    32,
    63,
    |lanes, block, part, word| block.six_bits(lanes, part, word),
    const UNPACKS: bool = true;
);
integers!(Q8_0, true, false, 128, 255, |lanes, block, _part, word| lanes.load_bits(&block.words[word]));
integers!(Bytes, true, true, 0, 255, true, |lanes, block, _part, word| lanes.load_bits(&block.words[word]));
integers!(
    Int8,
    false,
    false,
    128,
    255,
    |lanes, block, _part, word| lanes.load_bits(&block.0[word]),
    fn as_tiles(blocks: &[Self]) -> Option<&[[u32; WIDTH]]> {
        Some(bytemuck::cast_slice(blocks))
    }
);

/// Four nibbles for word `word` of eight: those at even positions of a word, then those at odd positions.
#[inline(always)]
fn nibbles<L: Lanes>(lanes: L, words: &[[u32; WIDTH]], word: usize) -> L::Bits {
    let bits = lanes.load_bits(&words[word % 4]);
    if word < 4 { lanes.field::<0>(bits, NIBBLES) } else { lanes.field::<4>(bits, NIBBLES) }
}

/// The low nibble of every byte.
const NIBBLES: u32 = 0x0F0F_0F0F;

impl F32 {
    /// The storage of sixteen decoded weights.
    pub(super) fn lanes_mut(&mut self) -> &mut [f32; WIDTH] {
        &mut self.0
    }
}

macro_rules! dense {
    ($block:ident, $load:ident, $bits:ty, |$lane:ident| $value:expr $(, $decoded:item)?) => {
        impl Block for $block {
            const WORDS: usize = 1;
            const STEPS: usize = 1;

            type Scale<L: Lanes> = ();

            #[inline(always)]
            fn scale<L: Lanes>(&self, _: L, _: usize) {}

            #[inline(always)]
            fn scale_for_step<L: Lanes>(_: L, (): (), _: usize) {}

            #[inline(always)]
            fn weights<L: Lanes>(&self, lanes: L, (): (), _: usize, _: usize) -> L::Float {
                lanes.$load(&self.0)
            }

            $($decoded)?

            fn element(&self, lane: usize, _: usize) -> f32 {
                let $lane = self.0[lane];
                $value
            }
        }

        impl FromBytes for $block {
            fn set_row(&mut self, lane: usize, bytes: &[u8]) {
                self.0[lane] = <$bits>::from_le_bytes(array(bytes));
            }
        }
    };
}

dense!(
    F32,
    load,
    f32,
    |lane| lane,
    fn decoded(blocks: &[Self]) -> Option<&[Self]> {
        Some(blocks)
    }
);
dense!(F16, load_f16, u16, |lane| f16::from_bits(lane).to_f32());
dense!(BF16, load_bf16, u16, |lane| bf16::from_bits(lane).to_f32());

/// Scales and offsets that turn integers into weights: `weight = integer * scale + offset`.
#[derive(Clone, Copy)]
pub(super) struct Scaled<L: Lanes> {
    scale: L::Float,
    offset: L::Float,
}

/// Takes element `step` of `BITS` bits out of words and decodes it. The one rounding is that of the multiply-add; the
/// products themselves are exact (11 bits of scale times at most 8).
#[inline(always)]
fn decode<L: Lanes, const BITS: usize>(lanes: L, affine: Scaled<L>, bits: L::Bits, step: usize) -> L::Float {
    let element = match (BITS, step) {
        (4, 7) => lanes.shifted::<28>(bits),
        (8, 3) => lanes.shifted::<24>(bits),
        _ => lanes.masked(bits, ((1 << BITS) - 1) << (BITS * step)),
    };
    lanes.mul_add(element, affine.scale, affine.offset)
}

/// The factor `2^-s` that undoes the position `s` of element `step`, which [`decode`] leaves in; 1 for the last, shifted
/// one. The smallest f16 scale is 2^-24 and the largest position 24, so nothing comes near the subnormal numbers; an f32 scale
/// that did would be that of weights too small to matter.
#[inline(always)]
fn for_step<L: Lanes, const BITS: usize>(lanes: L, affine: Scaled<L>, step: usize) -> Scaled<L> {
    let position = if step == 32 / BITS - 1 { 0 } else { BITS * step };
    let factor = f32::from_bits((127 - position as u32) << 23);
    Scaled { scale: lanes.mul(affine.scale, lanes.splat(factor)), ..affine }
}

macro_rules! quantised {
    ($block:ident, $words:literal, $bits:literal, |$lanes:ident, $of:ident| $scaled:expr, |$field:ident| $field_of:expr) => {
        impl Block for $block {
            const WORDS: usize = $words;
            const STEPS: usize = 32 / $bits;

            type Scale<L: Lanes> = Scaled<L>;

            #[inline(always)]
            fn scale<L: Lanes>(&self, $lanes: L, _: usize) -> Scaled<L> {
                let $of = self;
                let (scale, offset) = $scaled;
                Scaled { scale, offset }
            }

            #[inline(always)]
            fn scale_for_step<L: Lanes>(lanes: L, scale: Scaled<L>, step: usize) -> Scaled<L> {
                for_step::<L, $bits>(lanes, scale, step)
            }

            #[inline(always)]
            fn weights<L: Lanes>(&self, lanes: L, scale: Scaled<L>, word: usize, step: usize) -> L::Float {
                let $field = self;
                decode::<L, $bits>(lanes, scale, lanes.load_bits(&$field_of[word]), step)
            }

            fn element(&self, lane: usize, index: usize) -> f32 {
                let step = index / Self::WORDS;
                let word = index - step * Self::WORDS;
                let $field = self;
                let integer = ($field_of[word][lane] >> ($bits * step)) & ((1 << $bits) - 1);
                self.decode(lane, integer as f32)
            }
        }
    };
}

quantised!(
    Q4_0,
    4,
    4,
    |lanes, block| {
        let scale = lanes.load_f16(&block.scales);
        (scale, lanes.mul(scale, lanes.splat(-8.0)))
    },
    |block| block.words
);
quantised!(
    Q4_1,
    4,
    4,
    |lanes, block| (lanes.load_f16(&block.scales), lanes.load_f16(&block.minima)),
    |block| block.words
);
quantised!(
    Q8_0,
    8,
    8,
    |lanes, block| {
        let scale = lanes.load_f16(&block.scales);
        (scale, lanes.mul(scale, lanes.splat(-128.0)))
    },
    |block| block.words
);
quantised!(Nibbles, 4, 4, |lanes, block| (lanes.load(&block.scales), lanes.load(&block.offsets)), |block| {
    block.words
});
quantised!(Bytes, 4, 8, |lanes, block| (lanes.load(&block.scales), lanes.load(&block.offsets)), |block| {
    block.words
});
quantised!(Int8, 1, 8, |lanes, _block| (lanes.splat(1.0), lanes.splat(-128.0)), |block| block.0);

impl FromBytes for Q4_0 {
    fn set_row(&mut self, lane: usize, bytes: &[u8]) {
        self.scales[lane] = u16::from_le_bytes(array(bytes));
        set_nibbles(&mut self.words, lane, &bytes[2..]);
    }
}

impl Q4_0 {
    fn decode(&self, lane: usize, integer: f32) -> f32 {
        f16::from_bits(self.scales[lane]).to_f32() * (integer - 8.0)
    }
}

impl FromBytes for Q4_1 {
    fn set_row(&mut self, lane: usize, bytes: &[u8]) {
        self.scales[lane] = u16::from_le_bytes(array(bytes));
        self.minima[lane] = u16::from_le_bytes(array(&bytes[2..]));
        set_nibbles(&mut self.words, lane, &bytes[4..]);
    }
}

impl Q4_1 {
    fn decode(&self, lane: usize, integer: f32) -> f32 {
        f16::from_bits(self.scales[lane]).to_f32() * integer + f16::from_bits(self.minima[lane]).to_f32()
    }
}

impl FromBytes for Q8_0 {
    fn set_row(&mut self, lane: usize, bytes: &[u8]) {
        self.scales[lane] = u16::from_le_bytes(array(bytes));
        let q: [u8; 32] = array(&bytes[2..]);
        for (word, words) in self.words.iter_mut().enumerate() {
            let elements = u32::from_le_bytes([q[word], q[8 + word], q[16 + word], q[24 + word]]);
            // Flipping the sign bit of a signed byte adds 128.
            words[lane] = elements ^ 0x8080_8080;
        }
    }
}

impl Q8_0 {
    fn decode(&self, lane: usize, integer: f32) -> f32 {
        f16::from_bits(self.scales[lane]).to_f32() * (integer - 128.0)
    }
}

macro_rules! of_integers {
    ($block:ident, $bits:literal) => {
        impl FromIntegers for $block {
            fn set_integers(&mut self, lane: usize, integers: &[u8], affine: Affine) {
                self.scales[lane] = affine.scale;
                self.offsets[lane] = affine.minimum - affine.zero * affine.scale;
                for (word, words) in self.words.iter_mut().enumerate() {
                    let elements = integers.iter().skip(word).step_by(Self::WORDS).enumerate();
                    words[lane] = elements.fold(0, |sum, (step, q)| sum | u32::from(*q) << ($bits * step));
                }
            }
        }

        impl $block {
            fn decode(&self, lane: usize, integer: f32) -> f32 {
                // Rounded once, as in the kernels.
                integer.mul_add(self.scales[lane], self.offsets[lane])
            }
        }
    };
}

of_integers!(Nibbles, 4);
of_integers!(Bytes, 8);

impl FromIntegers for Int8 {
    fn set_integers(&mut self, lane: usize, integers: &[u8], _: Affine) {
        self.0[0][lane] = u32::from_le_bytes(array(integers));
    }
}

impl FromIntegers for F32 {
    fn set_integers(&mut self, lane: usize, integers: &[u8], affine: Affine) {
        self.0[lane] = affine.scale * (f32::from(integers[0]) - affine.zero) + affine.minimum;
    }
}

impl Int8 {
    fn decode(&self, _: usize, integer: f32) -> f32 {
        integer - 128.0
    }
}

/// The first `N` bytes. The blocks of a row are cut to size before they come here.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[..N]);
    array
}

/// Word `w` of the result has bytes `w`, `w + 4`, `w + 8` and `w + 12`.
fn dealt(bytes: &[u8]) -> [u32; 4] {
    let bytes: [u8; 16] = array(bytes);
    let word = |w: usize| u32::from_le_bytes([bytes[w], bytes[w + 4], bytes[w + 8], bytes[w + 12]]);
    [word(0), word(1), word(2), word(3)]
}

/// The low nibbles of four bytes, side by side in 16 bits.
fn low_nibbles(bytes: u32) -> u32 {
    let nibbles = bytes & NIBBLES;
    let pairs = (nibbles | nibbles >> 4) & 0x00FF_00FF;
    (pairs | pairs >> 8) & 0xFFFF
}

/// Elements 0..16 of a block are the low nibbles of its 16 bytes, elements 16..32 the high ones.
fn set_nibbles(words: &mut [[u32; WIDTH]; 4], lane: usize, bytes: &[u8]) {
    for (words, bytes) in words.iter_mut().zip(dealt(bytes)) {
        words[lane] = low_nibbles(bytes) | low_nibbles(bytes >> 4) << 16;
    }
}
