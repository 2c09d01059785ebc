//! The inner kernels: a strip of a panel times a few rows of activations.
//!
//! A tile is sixteen outputs (one panel) times up to [`Lanes::ROWS`] rows. Its sums stay in registers over a strip of
//! [`STRIP`] inputs; per sixteen weights there is one mask, one conversion and one multiply-add to decode them, and per
//! row one broadcast load and one multiply-add to use them. With one row, two panels are computed side by side, because
//! a single chain of dependent additions would be bound by its latency.
//!
//! Every output is the sum over strips of the sums within a strip, each in one fixed order of the inputs. The number of
//! rows decides only which sums are computed next to each other, so a row's result does not depend on the batch.

use super::panel::{Block, F32};
use crate::lanes::{Lanes, Task, WIDTH};

/// Inputs that are summed up before they are added to the output. A multiple of every block's length. Short strips keep
/// rounding errors of long sums down (they grow with the strip plus the number of strips, not with the inputs) and a
/// decoded strip, 16 KiB, in the L1 cache.
pub(super) const STRIP: usize = 256;

/// The place of a tile's weights.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// In the packed matrix, so the blocks that follow are prefetched.
    Memory,
    /// In a decoded strip, in the L1 cache.
    Decoded,
}

/// Bytes between the block in use and the block that is prefetched.
const AHEAD: usize = 2048;

/// The sums of one strip of `P` panels for `M` rows, in the order of `[panel][row]`.
pub(super) struct Tile<'a, B, const P: usize, const M: usize> {
    /// Blocks of the strip, the same number for every panel.
    pub(super) panels: [&'a [B]; P],
    /// The inputs of the strip of every row.
    pub(super) x: [&'a [f32]; M],
    pub(super) source: Source,
}

impl<B: Block, const P: usize, const M: usize> Task for Tile<'_, B, P, M> {
    type Output = [[[f32; WIDTH]; M]; P];

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Self::Output {
        let mut out = [[[0.0; WIDTH]; M]; P];
        for (out, sums) in out.iter_mut().flatten().zip(self.sums(lanes).into_iter().flatten()) {
            lanes.store(sums, out);
        }
        out
    }
}

impl<B: Block, const P: usize, const M: usize> Tile<'_, B, P, M> {
    /// The sums, in registers.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "plain loops over arrays end up in registers")]
    pub(super) fn sums<L: Lanes>(self, lanes: L) -> [[L::Float; M]; P] {
        let blocks = self.panels[0].len();
        assert!(self.panels.iter().all(|panel| panel.len() == blocks), "a strip is as long in every panel");
        assert!(self.x.iter().all(|x| x.len() == blocks * B::LENGTH), "a strip is as long in every row");

        // Loops rather than `array::map`: its closures are not always inlined, and a call costs more than the work.
        let mut sums = [[lanes.splat(0.0); M]; P];
        for index in 0..blocks {
            let mut block = [&self.panels[0][index]; P];
            for panel in 0..P {
                // SAFETY: every panel has `blocks` blocks, see above.
                block[panel] = unsafe { self.panels[panel].get_unchecked(index) };
            }
            for part in 0..B::PARTS {
                if self.source == Source::Memory {
                    for panel in 0..P {
                        prefetch(lanes, block[panel], part);
                    }
                }
                let mut scale = [block[0].scale(lanes, part); P];
                for panel in 1..P {
                    scale[panel] = block[panel].scale(lanes, part);
                }
                for step in 0..B::STEPS {
                    let mut step_scale = scale;
                    for panel in 0..P {
                        step_scale[panel] = B::scale_for_step(lanes, scale[panel], step);
                    }
                    for word in 0..B::WORDS {
                        let mut weights = [lanes.splat(0.0); P];
                        for panel in 0..P {
                            let word = part * B::WORDS + word;
                            weights[panel] = block[panel].weights(lanes, step_scale[panel], word, step);
                        }
                        let input = index * B::LENGTH + part * B::PART + step * B::WORDS + word;
                        for row in 0..M {
                            // SAFETY: `input < blocks * LENGTH`, which is the length of every row, see above.
                            let x = lanes.splat(unsafe { *self.x[row].get_unchecked(input) });
                            for panel in 0..P {
                                sums[panel][row] = lanes.mul_add(weights[panel], x, sums[panel][row]);
                            }
                        }
                    }
                }
            }
        }
        sums
    }
}

/// Prefetches what is [`AHEAD`] of a part of a block; all parts together prefetch as much as the block has. The hardware prefetcher
/// stops at the end of a page of 4 KiB, which is soon reached.
#[inline(always)]
pub(super) fn prefetch<L: Lanes, B: Block>(lanes: L, block: &B, part: usize) {
    let ahead = std::ptr::from_ref(block).cast::<u8>().wrapping_add(AHEAD);
    let lines = size_of::<B>().div_ceil(64).div_ceil(B::PARTS);
    for line in lines * part..lines * (part + 1) {
        lanes.prefetch(ahead.wrapping_add(64 * line));
    }
}

/// Decodes a strip of a panel, so that many rows can share the work.
pub(super) struct Decode<'a, B> {
    /// Blocks of the strip.
    pub(super) panel: &'a [B],
    /// One element for each of the strip's inputs.
    pub(super) weights: &'a mut [F32],
}

impl<B: Block> Task for Decode<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for (block, weights) in self.panel.iter().zip(self.weights.chunks_exact_mut(B::LENGTH)) {
            for (part, weights) in weights.chunks_exact_mut(B::PART).enumerate() {
                let scale = block.scale(lanes, part);
                for (step, weights) in weights.chunks_exact_mut(B::WORDS).enumerate() {
                    let scale = B::scale_for_step(lanes, scale, step);
                    for (word, weights) in weights.iter_mut().enumerate() {
                        let word = part * B::WORDS + word;
                        lanes.store(block.weights(lanes, scale, word, step), weights.lanes_mut());
                    }
                }
            }
        }
    }
}
