//! The kernel of products of integers, and the integers that it reads: as they are packed, or unpacked for many rows.

use super::{
    super::{panel::Integers, tile::prefetch},
    Activations, Factors, Group,
};
use crate::lanes::{Lanes, Task, WIDTH};
use std::{marker::PhantomData, ops::Range};

/// Elements of a row that are unpacked at a time: 12 KiB for sixteen rows with their scales, which stay in the L1 cache.
const UNPACKED: usize = 512;

/// Elements of a part of blocks that are unpacked.
const PART: usize = 16;

/// The integers of some blocks of a panel of type `B`, with their scales.
pub(super) trait Weights<B>: Copy {
    /// A part of a block.
    type Part: Part;

    /// Blocks.
    fn len(self) -> usize;
    /// A part of a block.
    ///
    /// # Safety
    /// `block` is less than [`Self::len`], and `part` than the number of parts of a block.
    unsafe fn part(self, block: usize, part: usize) -> Self::Part;
}

/// A part of a block.
pub(super) trait Part: Copy {
    /// Prefetches what is read some time later.
    fn prefetch<L: Lanes>(self, lanes: L);
    /// As [`Integers::bytes`].
    fn bytes<L: Lanes>(self, lanes: L, word: usize) -> L::Bits;
    /// The scales, and the offsets without the zero that sums are without.
    fn affine<L: Lanes>(self, lanes: L) -> (L::Float, L::Float);
}

/// Blocks as they are packed.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a, B> {
    pub(super) blocks: &'a [B],
    /// The zero that offsets contain.
    pub(super) zero: f32,
}

impl<B> Packed<'_, B> {
    /// Some of the blocks.
    pub(super) fn range(&self, blocks: &Range<usize>) -> Self {
        Self { blocks: &self.blocks[blocks.clone()], zero: self.zero }
    }
}

impl<'a, B: Integers> Weights<B> for Packed<'a, B> {
    type Part = PackedPart<'a, B>;

    #[inline(always)]
    fn len(self) -> usize {
        self.blocks.len()
    }

    #[inline(always)]
    unsafe fn part(self, block: usize, part: usize) -> PackedPart<'a, B> {
        // SAFETY: by the caller's promise.
        PackedPart { block: unsafe { self.blocks.get_unchecked(block) }, part, zero: self.zero }
    }
}

/// A part of a packed block.
#[derive(Clone, Copy)]
pub(super) struct PackedPart<'a, B> {
    block: &'a B,
    part: usize,
    zero: f32,
}

impl<B: Integers> Part for PackedPart<'_, B> {
    #[inline(always)]
    fn prefetch<L: Lanes>(self, lanes: L) {
        prefetch(lanes, self.block, self.part);
    }

    #[inline(always)]
    fn bytes<L: Lanes>(self, lanes: L, word: usize) -> L::Bits {
        self.block.bytes(lanes, self.part, word)
    }

    #[inline(always)]
    fn affine<L: Lanes>(self, lanes: L) -> (L::Float, L::Float) {
        let (scale, offset) = self.block.affine(lanes, self.part);
        // Zeros of whole matrices are powers of two, or scales are, so that nothing is rounded.
        let zero = lanes.splat(self.zero);
        (scale, if B::OFFSET_HAS_ZERO { lanes.mul_add(scale, zero, offset) } else { offset })
    }
}

/// [`UNPACKED`] elements of sixteen rows, a byte each.
pub(super) struct Unpacked<B> {
    parts: [UnpackedPart; UNPACKED / PART],
    /// Blocks in use.
    blocks: usize,
    of: PhantomData<B>,
}

/// A part of a block.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct UnpackedPart {
    words: [[u32; WIDTH]; PART / 4],
    scale: [f32; WIDTH],
    offset: [f32; WIDTH],
}

impl<B: Integers> Unpacked<B> {
    /// Blocks that fit.
    pub(super) const BLOCKS: usize = {
        assert!(!B::UNPACKS || B::PART == PART && UNPACKED.is_multiple_of(B::LENGTH));
        UNPACKED / B::LENGTH
    };

    pub(super) fn new() -> Self {
        let (words, scale, offset) = ([[0; WIDTH]; PART / 4], [0.0; WIDTH], [0.0; WIDTH]);
        let parts = [UnpackedPart { words, scale, offset }; UNPACKED / PART];
        Self { parts, blocks: 0, of: PhantomData }
    }
}

impl<'a, B: Integers> Weights<B> for &'a Unpacked<B> {
    type Part = &'a UnpackedPart;

    #[inline(always)]
    fn len(self) -> usize {
        self.blocks
    }

    #[inline(always)]
    unsafe fn part(self, block: usize, part: usize) -> &'a UnpackedPart {
        // SAFETY: no more blocks are in use than fit, and a part has `PART` elements; by the caller's promise.
        unsafe { self.parts.get_unchecked(block * B::PARTS + part) }
    }
}

impl Part for &UnpackedPart {
    #[inline(always)]
    fn prefetch<L: Lanes>(self, _: L) {}

    #[inline(always)]
    fn bytes<L: Lanes>(self, lanes: L, word: usize) -> L::Bits {
        lanes.load_bits(&self.words[word])
    }

    #[inline(always)]
    fn affine<L: Lanes>(self, lanes: L) -> (L::Float, L::Float) {
        (lanes.load(&self.scale), lanes.load(&self.offset))
    }
}

/// Unpacks blocks.
pub(super) struct Unpack<'a, B> {
    /// At most [`Unpacked::BLOCKS`].
    pub(super) packed: Packed<'a, B>,
    pub(super) unpacked: &'a mut Unpacked<B>,
}

impl<B: Integers> Task for Unpack<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { packed, unpacked } = self;
        unpacked.blocks = packed.len();
        assert!(unpacked.blocks <= Unpacked::<B>::BLOCKS, "blocks fit");
        for (block, parts) in unpacked.parts.chunks_exact_mut(B::PARTS).take(packed.len()).enumerate() {
            for (index, out) in parts.iter_mut().enumerate() {
                // SAFETY: `block` and `index` are one of the blocks and one of its parts.
                let part = unsafe { packed.part(block, index) };
                part.prefetch(lanes);
                for (word, out) in out.words.iter_mut().take(B::DOTS).enumerate() {
                    lanes.store_bits(part.bytes(lanes, word), out);
                }
                let (scale, offset) = part.affine(lanes);
                lanes.store(scale, &mut out.scale);
                lanes.store(offset, &mut out.offset);
            }
        }
    }
}

/// What some blocks of `P` panels add to the outputs for groups of `M` rows.
pub(super) struct Tiles<'a, B, W, const P: usize, const M: usize> {
    pub(super) x: &'a Activations,
    /// [`super::Product::per_sum`].
    pub(super) per_sum: usize,
    /// The blocks of each panel.
    pub(super) weights: [W; P],
    /// Which blocks of a panel these are.
    pub(super) blocks: Range<usize>,
    pub(super) groups: &'a [Group],
    /// The sums so far, from that of the first group's first row on; not read if these are the first blocks.
    pub(super) totals: &'a mut [[[f32; WIDTH]; P]],
    pub(super) of: PhantomData<B>,
}

impl<B: Integers, W: Weights<B>, const P: usize, const M: usize> Task for Tiles<'_, B, W, P, M> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (first, parts) = (self.blocks.start * B::PARTS, self.blocks.len() * B::PARTS);
        // Parts with scales have sums of their own; other blocks have one part.
        let blocks_of_sum = if B::SCALED { 1 } else { self.per_sum };
        let (first_sum, sums) = (first / blocks_of_sum, parts / blocks_of_sum);
        for (index, (group, rows)) in self.groups.iter().zip(self.totals.as_chunks_mut::<M>().0).enumerate() {
            let tile = Tile::<B, W, P, M> {
                weights: self.weights,
                blocks_of_sum,
                prefetches: index == 0,
                words: &self.x.words_of(*group)[first * B::DOTS * M..][..parts * B::DOTS * M],
                factors: &self.x.factors_of(*group)[first_sum * M..][..sums * M],
                of: PhantomData,
            };
            let mut totals = [[lanes.splat(0.0); M]; P];
            if self.blocks.start > 0 {
                for row in 0..M {
                    for panel in 0..P {
                        totals[panel][row] = lanes.load(&rows[row][panel]);
                    }
                }
            }
            let totals = tile.add_to(lanes, totals);
            for row in 0..M {
                for panel in 0..P {
                    lanes.store(totals[panel][row], &mut rows[row][panel]);
                }
            }
        }
    }
}

/// Blocks of `P` panels and a group of `M` rows. Totals are in the order of `[panel][row]`.
struct Tile<'a, B, W, const P: usize, const M: usize> {
    weights: [W; P],
    blocks_of_sum: usize,
    /// Whether to prefetch weights, which groups after the first find in the cache.
    prefetches: bool,
    /// The words of a group of `M` rows for these blocks.
    words: &'a [u32],
    factors: &'a [Factors],
    of: PhantomData<B>,
}

impl<B: Integers, W: Weights<B>, const P: usize, const M: usize> Tile<'_, B, W, P, M> {
    /// The totals with the sums of these blocks, which are added in order.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "plain loops over arrays end up in registers")]
    fn add_to<L: Lanes>(self, lanes: L, mut totals: [[L::Float; M]; P]) -> [[L::Float; M]; P] {
        let (weights, blocks_of_sum) = (self.weights, self.blocks_of_sum);
        let blocks = weights[0].len();
        let parts = blocks * B::PARTS;
        assert!(weights.iter().all(|panel| panel.len() == blocks), "panels are equally long");
        assert!(self.words.len() == parts * B::DOTS * M, "rows are as long as panels");
        assert!(self.factors.len() * blocks_of_sum == parts * M, "each sum has factors");

        for (sum, first) in (0..blocks).step_by(blocks_of_sum).enumerate() {
            for part in 0..B::PARTS {
                let factors = &self.factors[(sum * B::PARTS + part) * M..][..M];
                let mut sums = [[lanes.splat_sums(0); M]; P];
                for row in 0..M {
                    for panel in 0..P {
                        sums[panel][row] = lanes.splat_sums(factors[row].start);
                    }
                }
                // SAFETY: `first` is a block, and `part` one of its parts.
                let mut of_panel = [unsafe { weights[0].part(first, part) }; P];
                for block in first..first + blocks_of_sum {
                    for panel in 0..P {
                        // SAFETY: as above.
                        of_panel[panel] = unsafe { weights[panel].part(block, part) };
                        if self.prefetches {
                            of_panel[panel].prefetch(lanes);
                        }
                    }
                    let at = (block * B::PARTS + part) * B::DOTS;
                    // A macro and no function, because a closure need not be inlined.
                    macro_rules! add {
                        ($word:expr) => {
                            for panel in 0..P {
                                let bytes = of_panel[panel].bytes(lanes, $word);
                                for row in 0..M {
                                    // SAFETY: `at + word < parts * DOTS`, see above.
                                    let x = unsafe { *self.words.get_unchecked((at + $word) * M + row) };
                                    let sum = &mut sums[panel][row];
                                    *sum = if B::SMALL {
                                        lanes.dot_small(*sum, bytes, x)
                                    } else {
                                        lanes.dot(*sum, bytes, x)
                                    };
                                }
                            }
                        };
                    }
                    // The compiler does not unroll this loop. It pays where instructions stay in order; elsewhere they would be mixed
                    // such that registers do not suffice.
                    macro_rules! add_all {
                        ($($word:literal)*) => {{ $(add!($word);)* }};
                    }
                    match B::DOTS {
                        8 if B::SMALL && L::IN_PAIRS => add_all!(0 1 2 3 4 5 6 7),
                        words => {
                            for word in 0..words {
                                add!(word);
                            }
                        }
                    }
                }
                for panel in 0..P {
                    let (scale, offset) = of_panel[panel].affine(lanes);
                    for row in 0..M {
                        let mut factor = lanes.splat(factors[row].scale);
                        if B::SCALED {
                            factor = lanes.mul(factor, scale);
                        }
                        let mut sum = sums[panel][row];
                        if B::SMALL {
                            sum = lanes.widen_small(sum);
                        }
                        let total = &mut totals[panel][row];
                        *total = lanes.mul_add(lanes.sums_to_float(sum), factor, *total);
                        if B::OFFSET {
                            *total = lanes.mul_add(offset, lanes.splat(factors[row].offset), *total);
                        }
                    }
                }
            }
        }
        totals
    }
}
