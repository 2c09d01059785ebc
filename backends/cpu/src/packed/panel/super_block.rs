//! Blocks of 256 elements whose parts have scales of few bits: factors of the scale of the block.

use super::{
    Block, FromBytes, Lanes, NIBBLES, Pod, Scaled, WIDTH, Zeroable, array, dealt, decode, for_step,
    low_nibbles,
};
use dsrun_core::six_bit_factors;
use half::f16;

/// 256 elements of sixteen rows, in parts of 32.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(in crate::packed) struct Q4K {
    scales: [u16; WIDTH],
    minima: [u16; WIDTH],
    /// The scale of a part is that of the block times this.
    factors: [[u8; WIDTH]; 8],
    /// The minimum of a part is that of the block times this, subtracted.
    offsets: [[u8; WIDTH]; 8],
    pub(super) words: [[u32; WIDTH]; 32],
}

/// 256 elements of sixteen rows, in parts of 16.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(in crate::packed) struct Q6K {
    scales: [u16; WIDTH],
    /// The scale of a part is that of the block times this less 128.
    factors: [[u8; WIDTH]; 16],
    /// Two words for each part.
    low: [[u32; WIDTH]; 32],
    /// Bits 4 and 5: one word for each part. Byte `b` holds those of elements `4b + w` at bits `2w`.
    high: [[u32; WIDTH]; 16],
}

impl Block for Q4K {
    const PARTS: usize = 8;
    const WORDS: usize = 4;
    const STEPS: usize = 8;

    type Scale<L: Lanes> = Scaled<L>;

    #[inline(always)]
    fn scale<L: Lanes>(&self, lanes: L, part: usize) -> Scaled<L> {
        // 11 bits of scale times 6 bits of factor: exact.
        let scale = lanes.mul(lanes.load_f16(&self.scales), lanes.load_u8(&self.factors[part]));
        let minimum = lanes.mul(lanes.load_f16(&self.minima), lanes.load_u8(&self.offsets[part]));
        Scaled { scale, offset: lanes.mul(minimum, lanes.splat(-1.0)) }
    }

    #[inline(always)]
    fn scale_for_step<L: Lanes>(lanes: L, scale: Scaled<L>, step: usize) -> Scaled<L> {
        for_step::<L, 4>(lanes, scale, step)
    }

    #[inline(always)]
    fn weights<L: Lanes>(&self, lanes: L, scale: Scaled<L>, word: usize, step: usize) -> L::Float {
        decode::<L, 4>(lanes, scale, lanes.load_bits(&self.words[word]), step)
    }

    fn element(&self, lane: usize, index: usize) -> f32 {
        let (part, index) = (index / Self::PART, index % Self::PART);
        let integer = self.words[4 * part + index % 4][lane] >> (4 * (index / 4)) & 15;
        let float = |bits: u16| f16::from_bits(bits).to_f32();
        let scale = float(self.scales[lane]) * f32::from(self.factors[part][lane]);
        let minimum = float(self.minima[lane]) * f32::from(self.offsets[part][lane]);
        // Rounded once, as in the kernels.
        (integer as f32).mul_add(scale, -minimum)
    }
}

impl Block for Q6K {
    const PARTS: usize = 16;
    const WORDS: usize = 4;
    const STEPS: usize = 4;

    type Scale<L: Lanes> = Scaled<L>;

    #[inline(always)]
    fn scale<L: Lanes>(&self, lanes: L, part: usize) -> Scaled<L> {
        let of_block = lanes.load_f16(&self.scales);
        // 11 bits of scale times 8 bits of factor: exact, and so is what is subtracted.
        let zero = lanes.mul(of_block, lanes.splat(-128.0));
        let scale = lanes.mul_add(lanes.load_u8(&self.factors[part]), of_block, zero);
        Scaled { scale, offset: lanes.mul(scale, lanes.splat(-32.0)) }
    }

    #[inline(always)]
    fn scale_for_step<L: Lanes>(lanes: L, scale: Scaled<L>, step: usize) -> Scaled<L> {
        for_step::<L, 8>(lanes, scale, step)
    }

    #[inline(always)]
    fn weights<L: Lanes>(&self, lanes: L, scale: Scaled<L>, word: usize, step: usize) -> L::Float {
        decode::<L, 8>(lanes, scale, self.six_bits(lanes, word / 4, word % 4), step)
    }

    fn element(&self, lane: usize, index: usize) -> f32 {
        let (part, index) = (index / Self::PART, index % Self::PART);
        let (word, byte) = (index % 4, index / 4);
        let low = self.low[2 * part + word % 2][lane] >> (8 * byte + 4 * (word / 2)) & 15;
        let high = self.high[part][lane] >> (8 * byte + 2 * word) & 3;
        let factor = f32::from(self.factors[part][lane]) - 128.0;
        f16::from_bits(self.scales[lane]).to_f32() * factor * ((low | high << 4) as f32 - 32.0)
    }
}

impl Q6K {
    /// Elements `word`, `word + 4`, `word + 8` and `word + 12` of a part, one in each byte.
    #[inline(always)]
    pub(super) fn six_bits<L: Lanes>(&self, lanes: L, part: usize, word: usize) -> L::Bits {
        let low = lanes.load_bits(&self.low[2 * part + word % 2]);
        let low = if word < 2 { lanes.field::<0>(low, NIBBLES) } else { lanes.field::<4>(low, NIBBLES) };
        let (high, mask) = (lanes.load_bits(&self.high[part]), 0x3030_3030);
        let high = match word {
            0 => lanes.field::<-4>(high, mask),
            1 => lanes.field::<-2>(high, mask),
            2 => lanes.field::<0>(high, mask),
            _ => lanes.field::<2>(high, mask),
        };
        lanes.or(low, high)
    }
}

impl FromBytes for Q4K {
    const BYTES: usize = 144;

    fn set_row(&mut self, lane: usize, bytes: &[u8]) {
        self.scales[lane] = u16::from_le_bytes(array(bytes));
        self.minima[lane] = u16::from_le_bytes(array(&bytes[2..]));
        for part in 0..Self::PARTS {
            let (scale, minimum) = six_bit_factors(&bytes[4..16], part);
            (self.factors[part][lane], self.offsets[part][lane]) = (scale, minimum);
        }
        // 32 bytes have the elements of two parts, in their low and in their high nibbles.
        for (words, bytes) in self.words.chunks_exact_mut(8).zip(bytes[16..].chunks_exact(32)) {
            let (first, second) = (dealt(bytes), dealt(&bytes[16..]));
            for word in 0..4 {
                let [first, second] = [first[word], second[word]];
                words[word][lane] = low_nibbles(first) | low_nibbles(second) << 16;
                words[4 + word][lane] = low_nibbles(first >> 4) | low_nibbles(second >> 4) << 16;
            }
        }
    }
}

impl FromBytes for Q6K {
    fn set_row(&mut self, lane: usize, bytes: &[u8]) {
        self.scales[lane] = u16::from_le_bytes(array(&bytes[208..]));
        for (factors, factor) in self.factors.iter_mut().zip(&bytes[192..208]) {
            // Flipping the sign bit of a signed byte adds 128.
            factors[lane] = factor ^ 0x80;
        }
        // Of each half of the block, 64 bytes have the low nibbles of parts 0 to 3 and the high ones of parts 4 to 7, as nibbles; and
        // 32 bytes have pairs of bits of parts 0 and 1, then 2 and 3, and so on.
        for part in 0..Self::PARTS {
            let (half, part_of_half) = (part / 8, part % 8);
            let low = dealt(&bytes[64 * half + part_of_half % 4 * 16..]);
            let high = dealt(&bytes[128 + 32 * half + part_of_half % 2 * 16..]);
            let nibbles = low.map(|bytes| bytes >> (part_of_half / 4 * 4) & NIBBLES);
            let pairs = high.map(|bytes| bytes >> (part_of_half / 2 * 2) & 0x0303_0303);
            self.low[2 * part][lane] = nibbles[0] | nibbles[2] << 4;
            self.low[2 * part + 1][lane] = nibbles[1] | nibbles[3] << 4;
            self.high[part][lane] = pairs[0] | pairs[1] << 2 | pairs[2] << 4 | pairs[3] << 6;
        }
    }
}
