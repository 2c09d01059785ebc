//! Products of quantised activations and integer weights, in integers.
//!
//! Four activations are one word, which is multiplied with four integers of all sixteen rows of a panel at once: one instruction
//! where the processor has VNNI or i8mm. AVX2 adds up products of two bytes only, in 16 bits: those of small integers are kept as
//! such up to the end of a part, and those of bytes are multiplied as numbers of 16 bits. Integers of weights are unsigned: those of signed formats are stored with a zero
//! added, and the zero times the sum of the activations is subtracted from the sum. Intermediate sums may wrap
//! around; the result fits, so it is right.
//!
//! A sum covers one part of a block of weights that has a scale, or all activations that share a scale where blocks have no scales of their own. It is exact.
//! With the scales of both it is added to the f32 of the output, in the order of the inputs: a row's result depends neither on
//! the other rows nor on the threads.

mod tile;

use super::{
    amx::{ROWS_OF_TILE, Tiled, WORDS_OF_TILE},
    panel::Integers,
    product::{Output, pieces},
};
use crate::lanes::{Dots, InstructionSet, Lanes, Task, WIDTH};
use dsrun_core::op::LinearW8A8;
use rayon::prelude::*;
use std::{marker::PhantomData, ops::Range};
use tile::{Packed, Tiles, Unpack, Unpacked, Weights};

/// Multiplications below which a task is not worth handing to another thread.
const SMALLEST_TASK: usize = 64 << 10;

/// Elements of the longest part of a block.
const LONGEST_PART: usize = 32;

/// Bytes of activations that are multiplied with all panels of a task before the next ones: they stay in the L2 cache.
const SLAB_BYTES: usize = 384 << 10;

/// Quantised activations, in the order of memory.
#[derive(Clone, Copy)]
pub(crate) struct QuantisedRow<'a> {
    pub(crate) integers: &'a [i8],
    /// One for each group of integers.
    pub(crate) scales: &'a [f32],
}

/// Groups of rows from which on it takes less time to unpack the integers of a panel once, where every group unpacks them otherwise.
const GROUPS_WORTH_UNPACKING: usize = 3;

/// Rows that a kernel multiplies at once.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Group {
    pub(super) first: usize,
    count: usize,
    /// If these are the rows of a tile ([`super::amx`]), the words of a row that it multiplies at once: so many words of each row
    /// stand together, a power of two. Otherwise it is one: the rows stand side by side.
    together: usize,
}

impl Group {
    /// Cuts rows into groups: tiles, if there may be, and groups of at most `most` rows, of the sizes that kernels are compiled for.
    fn of_rows(rows: usize, tiles: bool, most: usize) -> Vec<Self> {
        let mut groups = Vec::with_capacity(rows.div_ceil(most) + 3);
        let mut first = 0;
        while tiles && first + ROWS_OF_TILE <= rows {
            groups.push(Self { first, count: ROWS_OF_TILE, together: WORDS_OF_TILE });
            first += ROWS_OF_TILE;
        }
        while first < rows {
            let count = match (rows - first).min(most) {
                1 => 1,
                2 | 3 => 2,
                4 | 5 => 4,
                6 | 7 => 6,
                8..12 => 8,
                _ => 12,
            };
            groups.push(Self { first, count, together: 1 });
            first += count;
        }
        groups
    }
}

/// Quantised activations, as the kernel for one type of blocks reads them.
pub(super) struct Activations {
    /// The groups of rows, in order.
    groups: Vec<Group>,
    /// Four bytes each, in the order of [`Integers::DOTS`], group after group.
    words: Vec<u32>,
    /// Words of a row.
    width: usize,
    /// The factors of every sum, group after group; those of the rows of a group side by side.
    factors: Vec<Factors>,
    /// Sums of a row.
    sums: usize,
    rows: usize,
}

/// What the activations contribute to an output besides the products of integers.
#[derive(Clone, Copy, Default)]
pub(super) struct Factors {
    /// The scale of the activations.
    pub(super) scale: f32,
    /// The scaled sum of the activations, which the offset of weights is multiplied with.
    pub(super) offset: f32,
    /// The start of the sum: what the zero of the weights adds to it is subtracted. Two numbers of 16 bits where sums are
    /// of pairs ([`Lanes::IN_PAIRS`]).
    pub(super) start: i32,
}

impl Activations {
    /// Arranges rows for panels of `parts` parts, `per_sum` of which have a common sum. `zero` is the zero of the weights.
    fn new<B: Integers>(
        rows: &[QuantisedRow<'_>],
        parts: usize,
        per_sum: usize,
        zero: i32,
        groups: Vec<Group>,
        dots: Dots,
        pool: &rayon::ThreadPool,
    ) -> Self {
        let starts = if !B::SMALL {
            // The bias that products subtract from the weights is a part of their zero.
            Starts { zero: zero - dots.bias, in_pairs: false }
        } else {
            Starts { zero, in_pairs: dots.in_pairs }
        };
        let (width, sums) = (parts * B::DOTS, parts / per_sum);
        let mut words = vec![0; rows.len() * width];
        let mut factors = vec![Factors::default(); rows.len() * sums];
        let (mut rest_of_words, mut rest_of_factors) = (&mut words[..], &mut factors[..]);
        let targets = groups.iter().map(|group| {
            let (words, rest) = std::mem::take(&mut rest_of_words).split_at_mut(group.count * width);
            rest_of_words = rest;
            let (factors, rest) = std::mem::take(&mut rest_of_factors).split_at_mut(group.count * sums);
            rest_of_factors = rest;
            (group, words, factors)
        });
        let fill = |(group, words, factors): (&Group, &mut [u32], &mut [Factors])| {
            for (index, row) in rows[group.first..][..group.count].iter().enumerate() {
                set_row::<B>(row, per_sum, starts, (*group, index), words, factors);
            }
        };
        if rows.len() * width < SMALLEST_TASK {
            targets.for_each(fill);
        } else {
            let targets: Vec<_> = targets.collect();
            pool.install(|| targets.into_par_iter().for_each(fill));
        }
        Self { groups, words, width, factors, sums, rows: rows.len() }
    }

    pub(super) fn words_of(&self, group: Group) -> &[u32] {
        &self.words[group.first * self.width..][..group.count * self.width]
    }

    pub(super) fn factors_of(&self, group: Group) -> &[Factors] {
        &self.factors[group.first * self.sums..][..group.count * self.sums]
    }
}

/// Arranges row `index` of a group for parts of blocks of type `B`, `per_sum` of which have a common sum.
fn set_row<B: Integers>(
    row: &QuantisedRow<'_>,
    per_sum: usize,
    starts: Starts,
    (group, index): (Group, usize),
    words: &mut [u32],
    factors: &mut [Factors],
) {
    let Group { count, together, .. } = group;
    // A division for every word would take longer than all else.
    let shift = together.trailing_zeros();
    for (part, integers) in row.integers.chunks(B::PART).enumerate() {
        let mut bytes = [0u8; LONGEST_PART];
        bytes[..integers.len()].copy_from_slice(bytemuck::cast_slice(integers));
        for word in 0..B::DOTS {
            let of_word = [0, 1, 2, 3].map(|at| bytes[at * B::DOTS + word]);
            let at = part * B::DOTS + word;
            let place = (((at >> shift) * count + index) << shift) + (at & (together - 1));
            words[place] = u32::from_le_bytes(of_word);
        }
    }
    let length = per_sum * B::PART;
    let of_scale = row.integers.len().div_ceil(row.scales.len().max(1)).max(1);
    for (sum, integers) in row.integers.chunks(length).enumerate() {
        let total = integers.iter().map(|byte| i32::from(*byte)).sum::<i32>();
        let scale = row.scales[sum * length / of_scale];
        let start = starts.of::<B>(integers, total);
        factors[sum * count + index] = Factors { scale, offset: scale * total as f32, start };
    }
}

/// The starts of sums.
#[derive(Clone, Copy)]
struct Starts {
    /// What is still to be subtracted from weights after their multiplication.
    zero: i32,
    /// Whether the activations of a part that are the first two bytes of a word, and those that are the last two, have sums of their own.
    in_pairs: bool,
}

impl Starts {
    /// The start for the activations of a sum, which add up to `total`.
    #[inline(always)]
    fn of<B: Integers>(self, integers: &[i8], total: i32) -> i32 {
        if !self.in_pairs {
            return total.wrapping_mul(-self.zero);
        }
        let first = integers.iter().take(B::PART / 2).map(|byte| i32::from(*byte)).sum::<i32>();
        let [first, last] = [first, total - first].map(|sum| sum.wrapping_mul(-self.zero));
        first & 0xFFFF | last << 16
    }
}

/// Whether activations with a scale for each `group` of `inputs` can be multiplied with blocks of this type, without an overflow.
pub(super) fn accepts<B: Integers>(group: usize, inputs: usize) -> bool {
    let whole = |length: usize| length > 0 && length.is_multiple_of(B::PART) && inputs.is_multiple_of(length);
    let fits = B::SCALED || group <= LinearW8A8::MAX_INPUTS;
    fits && (whole(group) && inputs.is_multiple_of(B::LENGTH) || !B::SCALED && group == inputs && group > 0)
}

/// Computes `out`, which is `[rows, outputs]`, from panels and activations that [`accepts`] accepts. Scales that stand outside of
/// the blocks are not applied. `zero` is the zero of all weights that is contained in their offsets, if there is one.
pub(super) fn multiply<B: Integers>(
    instructions: InstructionSet,
    panels: &[B],
    zero: i32,
    outputs: usize,
    rows: &[QuantisedRow<'_>],
    out: &mut [f32],
    pool: &rayon::ThreadPool,
) {
    let Some(first) = rows.first().filter(|row| outputs > 0 && !row.integers.is_empty()) else {
        out.fill(0.0);
        return;
    };
    let blocks = first.integers.len().div_ceil(B::LENGTH);
    let groups = first.scales.len();
    let per_sum = if B::SCALED { 1 } else { blocks * B::PARTS / groups };
    let zero = if B::OFFSET_HAS_ZERO { zero } else { B::ZERO };
    let (tiled, dots) = (Tiled::new::<B>(instructions, per_sum), instructions.dots());
    let groups = Group::of_rows(rows.len(), tiled.is_some(), dots.rows);
    let x = Activations::new::<B>(rows, blocks * B::PARTS, per_sum, zero, groups, dots, pool);
    let product = Product { panels, blocks, per_sum, zero, x: &x, out: Output::new(out, outputs) };
    let count = outputs.div_ceil(WIDTH);
    let work = outputs.saturating_mul(first.integers.len()).saturating_mul(x.rows);
    let tasks = (work / SMALLEST_TASK).clamp(1, pool.current_num_threads() * 2).min(count);
    let task = |index: usize| {
        let panels = count * index / tasks..count * (index + 1) / tasks;
        let groups = &product.x.groups[..];
        let (in_tiles, others) = groups.split_at(groups.partition_point(|group| group.together > 1));
        if let Some(tiled) = tiled.as_ref().filter(|_| !in_tiles.is_empty()) {
            tiled.multiply(&product, panels.clone(), in_tiles);
        }
        if !others.is_empty() {
            instructions.run(Panels { product: &product, panels, groups: others });
        }
    };
    if tasks == 1 {
        task(0);
    } else {
        pool.install(|| (0..tasks).into_par_iter().with_max_len(1).for_each(task));
    }
}

pub(super) struct Product<'a, B> {
    pub(super) panels: &'a [B],
    /// Blocks of a panel.
    pub(super) blocks: usize,
    /// Parts of blocks of a sum.
    pub(super) per_sum: usize,
    pub(super) zero: i32,
    pub(super) x: &'a Activations,
    pub(super) out: Output<'a>,
}

/// The outputs of a range of panels, for groups that are no tiles.
struct Panels<'a, 'p, B> {
    product: &'a Product<'p, B>,
    panels: Range<usize>,
    groups: &'a [Group],
}

impl<B: Integers> Task for Panels<'_, '_, B> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        self.product.compute(lanes, self.panels, self.groups);
    }
}

impl<B: Integers> Product<'_, B> {
    fn compute<L: Lanes>(&self, lanes: L, panels: Range<usize>, groups: &[Group]) {
        if let [group @ Group { count: 1, .. }] = groups {
            // Two halves side by side, each from front to back: two streams of weights from memory.
            let half = panels.len() / 2;
            for panel in panels.start..panels.start + half {
                self.row_of_panels(lanes, [panel, panel + half], group);
            }
            for panel in panels.start + 2 * half..panels.end {
                self.row_of_panels(lanes, [panel], group);
            }
            return;
        }
        let bytes_of_group = 4 * self.x.width * L::ROWS_INTEGERS;
        let (mut totals, mut unpacked) = (Vec::new(), None);
        for slab in groups.chunks((SLAB_BYTES / bytes_of_group.max(1)).max(1)) {
            let unpacks = L::UNPACKS && B::UNPACKS && slab.len() >= GROUPS_WORTH_UNPACKING;
            totals.resize(slab.iter().map(|group| group.count).sum(), [[0.0; WIDTH]]);
            for panel in panels.clone() {
                let (packed, all) = (self.panel(panel), 0..self.blocks);
                if unpacks {
                    let unpacked = unpacked.get_or_insert_with(Unpacked::new);
                    for blocks in pieces(all, Unpacked::<B>::BLOCKS) {
                        lanes.run(Unpack { packed: packed.range(&blocks), unpacked });
                        self.rows_of_panel(lanes, &*unpacked, &blocks, slab, &mut totals);
                    }
                } else {
                    self.rows_of_panel(lanes, packed, &all, slab, &mut totals);
                }
                let first = slab.first().map_or(0, |group| group.first);
                for (row, [sums]) in totals.iter().enumerate() {
                    // SAFETY: this task owns the panels.
                    unsafe { self.out.set(first + row, panel, sums) };
                }
            }
        }
    }

    /// Computes the only row of `P` panels.
    fn row_of_panels<L: Lanes, const P: usize>(&self, lanes: L, panels: [usize; P], group: &Group) {
        let (mut totals, weights) = ([[[0.0; WIDTH]; P]], panels.map(|panel| self.panel(panel)));
        let (blocks, groups) = (0..self.blocks, std::slice::from_ref(group));
        lanes.run(Tiles::<B, _, P, 1> {
            x: self.x,
            per_sum: self.per_sum,
            weights,
            blocks,
            groups,
            totals: &mut totals,
            of: PhantomData,
        });
        for (panel, sums) in panels.into_iter().zip(&totals[0]) {
            // SAFETY: this task owns the panels.
            unsafe { self.out.set(group.first, panel, sums) };
        }
    }

    /// Adds what some blocks of a panel contribute to the sums of groups of rows.
    fn rows_of_panel<L: Lanes, W: Weights<B>>(
        &self,
        lanes: L,
        weights: W,
        blocks: &Range<usize>,
        groups: &[Group],
        mut totals: &mut [[[f32; WIDTH]; 1]],
    ) {
        for groups in groups.chunk_by(|a, b| a.count == b.count) {
            let count = groups.first().map_or(0, |group| group.count);
            let (here, others) = totals.split_at_mut(groups.len() * count);
            totals = others;
            macro_rules! groups {
                ($count:literal) => {
                    lanes.run(Tiles::<B, W, 1, $count> {
                        x: self.x,
                        per_sum: self.per_sum,
                        weights: [weights],
                        blocks: blocks.clone(),
                        groups,
                        totals: here,
                        of: PhantomData,
                    })
                };
            }
            match count {
                0 => {}
                1 => groups!(1),
                2 => groups!(2),
                4 => groups!(4),
                6 => groups!(6),
                8 => groups!(8),
                _ => groups!(12),
            }
        }
    }

    fn panel(&self, panel: usize) -> Packed<'_, B> {
        Packed { blocks: &self.panels[panel * self.blocks..][..self.blocks], zero: self.zero as f32 }
    }
}
