//! Products of quantised activations and integer weights in tiles of AMX: sixteen rows of activations with a panel.
//!
//! Only for weights that are laid out as tiles are, and have scales for whole rows: a tile then sums up to the next scale of the
//! activations. Sums are those that [`super::integers`] makes a word at a time, and scales are applied in the same order, so that
//! results are equal, to the bit. Blocks with scales of their own end a sum every 32 elements; applying the scales then takes longer
//! than the products, and tiles were no faster.

use super::{
    integers::{Group, Product},
    panel::Integers,
};
use crate::lanes::{
    Amx, InstructionSet, Lanes, Task, WIDTH,
    amx::{ROWS, Sums, Tiles, WORDS},
};
use std::ops::Range;

/// Rows of activations of a tile.
pub(super) const ROWS_OF_TILE: usize = ROWS;

/// Words of a row of activations that a tile multiplies at once.
pub(super) const WORDS_OF_TILE: usize = WORDS;

/// That tiles can multiply blocks of one type.
pub(super) struct Tiled(Amx);

impl Tiled {
    /// Tiles for blocks of type `B`, if the processor has tiles and the blocks are laid out for them. `per_sum` parts of blocks have a
    /// common sum.
    pub(super) fn new<B: Integers>(instructions: InstructionSet, per_sum: usize) -> Option<Self> {
        let InstructionSet::Amx(amx) = instructions else { return None };
        let fits = B::as_tiles(&[]).is_some() && (per_sum * B::DOTS).is_multiple_of(WORDS);
        fits.then_some(Self(amx))
    }

    /// Computes the outputs of a range of panels for groups of [`ROWS_OF_TILE`] rows.
    pub(super) fn multiply<B: Integers>(
        &self,
        product: &Product<'_, B>,
        panels: Range<usize>,
        groups: &[Group],
    ) {
        let Self(amx) = self;
        amx.with_tiles(|tiles| amx.lanes().run(Panels { product, panels, groups, tiles: &tiles }));
    }
}

struct Panels<'a, 'p, B> {
    product: &'a Product<'p, B>,
    panels: Range<usize>,
    groups: &'a [Group],
    tiles: &'a Tiles,
}

impl<B: Integers> Task for Panels<'_, '_, B> {
    type Output = ();

    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "plain loops over arrays end up in registers")]
    fn run<L: Lanes>(self, lanes: L) {
        let Product { panels, blocks, per_sum, x, out, .. } = self.product;
        let of_sum = per_sum * B::DOTS;
        let mut found = Sums([[0; WIDTH]; ROWS]);
        for panel in self.panels {
            let Some(weights) = B::as_tiles(&panels[panel * blocks..][..*blocks]) else { return };
            for group in self.groups {
                for row in 0..ROWS {
                    lanes.prefetch(out.address(group.first + row, panel).cast());
                }
                let words = x.words_of(*group).chunks_exact(ROWS * of_sum);
                let factors = x.factors_of(*group).chunks_exact(ROWS);
                let mut totals = [lanes.splat(0.0); ROWS];
                for ((words, factors), weights) in words.zip(factors).zip(weights.chunks_exact(of_sum)) {
                    self.tiles.dot(words, weights, &mut found);
                    for row in 0..ROWS {
                        let sums = lanes.load_sums(&found.0[row]);
                        let sums = lanes.add_sums(sums, lanes.splat_sums(factors[row].start));
                        let factor = lanes.splat(factors[row].scale);
                        totals[row] = lanes.mul_add(lanes.sums_to_float(sums), factor, totals[row]);
                    }
                }
                for row in 0..ROWS {
                    let mut sums = [0.0; WIDTH];
                    lanes.store(totals[row], &mut sums);
                    // SAFETY: this task owns the panels.
                    unsafe { out.set(group.first + row, panel, &sums) };
                }
            }
        }
    }
}
