//! Products of quantised activations and integer weights, in integers.
//!
//! Four activations are one word, which is multiplied with four integers of all sixteen rows of a panel at once: one instruction
//! where the processor has VNNI or i8mm, a few with AVX2. Integers of weights are unsigned: those of signed formats are stored with a zero
//! added, and the zero times the sum of the activations is subtracted from the sum. Intermediate sums may wrap
//! around; the result fits, so it is right.
//!
//! A sum covers one part of a block of weights that has a scale, or all activations that share a scale where blocks have no scales of their own. It is exact.
//! With the scales of both it is added to the f32 of the output, in the order of the inputs: a row's result depends neither on
//! the other rows nor on the threads.

use super::{
    amx::{ROWS_OF_TILE, Tiled, WORDS_OF_TILE},
    panel::Integers,
    product::Output,
    tile::prefetch,
};
use crate::lanes::{InstructionSet, Lanes, Task, WIDTH};
use dsrun_core::op::LinearW8A8;
use rayon::prelude::*;
use std::ops::Range;

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
    /// The start of the sum: what the zero of the weights adds to it is subtracted.
    pub(super) start: i32,
}

impl Activations {
    /// Arranges rows for panels of `parts` parts, `per_sum` of which have a common sum. `zero` is what is still to be subtracted from
    /// weights after their multiplication.
    fn new<B: Integers>(
        rows: &[QuantisedRow<'_>],
        parts: usize,
        per_sum: usize,
        zero: i32,
        groups: Vec<Group>,
        pool: &rayon::ThreadPool,
    ) -> Self {
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
                set_row::<B>(row, per_sum, zero, (*group, index), words, factors);
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
    zero: i32,
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
        factors[sum * count + index] =
            Factors { scale, offset: scale * total as f32, start: total.wrapping_mul(-zero) };
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
    let tiled = Tiled::new::<B>(instructions, per_sum);
    let groups = Group::of_rows(rows.len(), tiled.is_some(), instructions.rows_of_integers());
    // A bias that products subtract from the weights is a part of their zero.
    let bias = if B::SMALL { 0 } else { instructions.dot_bias() };
    let x = Activations::new::<B>(rows, blocks * B::PARTS, per_sum, zero - bias, groups, pool);
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
        if let [Group { count: 1, .. }] = groups {
            // Two halves side by side, each from front to back: two streams of weights from memory.
            let half = panels.len() / 2;
            let first = panels.start..panels.start + half;
            lanes.run(Tiles::<B, 2, 1> { product: self, panels: first, apart: half, groups });
            let last = panels.start + 2 * half..panels.end;
            lanes.run(Tiles::<B, 1, 1> { product: self, panels: last, apart: 0, groups });
            return;
        }
        let bytes_of_group = 4 * self.x.width * L::ROWS_INTEGERS;
        for slab in groups.chunks((SLAB_BYTES / bytes_of_group.max(1)).max(1)) {
            for panel in panels.clone() {
                for groups in slab.chunk_by(|a, b| a.count == b.count) {
                    self.groups_of_panel(lanes, panel, groups);
                }
            }
        }
    }

    /// Multiplies a panel with groups of the same size.
    fn groups_of_panel<L: Lanes>(&self, lanes: L, panel: usize, groups: &[Group]) {
        macro_rules! groups {
            ($count:literal) => {
                lanes.run(Tiles::<B, 1, $count> { product: self, panels: panel..panel + 1, apart: 0, groups })
            };
        }
        match groups.first().map_or(0, |group| group.count) {
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

/// The outputs of panels, `P` at a time, for groups of `M` rows.
struct Tiles<'a, 'p, B, const P: usize, const M: usize> {
    product: &'a Product<'p, B>,
    /// The first panels of each tile.
    panels: Range<usize>,
    /// From a panel of a tile to the next.
    apart: usize,
    groups: &'a [Group],
}

impl<B: Integers, const P: usize, const M: usize> Task for Tiles<'_, '_, B, P, M> {
    type Output = ();

    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "plain loops over arrays end up in registers")]
    fn run<L: Lanes>(self, lanes: L) {
        let Product { panels, blocks, per_sum, zero, x, out } = self.product;
        for panel in self.panels.clone() {
            let of = |index: usize| &panels[(panel + index * self.apart) * blocks..][..*blocks];
            for group in self.groups {
                let (words, factors) = (x.words_of(*group), x.factors_of(*group));
                let (per_sum, zero) = (*per_sum, *zero as f32);
                let tile = Tile::<B, P, M> { panels: std::array::from_fn(of), per_sum, zero, words, factors };
                let sums = tile.sums(lanes);
                for index in 0..P {
                    for m in 0..M {
                        // SAFETY: this task owns the panels.
                        unsafe {
                            out.set(lanes, group.first + m, panel + index * self.apart, sums[index][m])
                        };
                    }
                }
            }
        }
    }
}

/// The sums of `P` panels for `M` rows, in the order of `[panel][row]`.
struct Tile<'a, B, const P: usize, const M: usize> {
    panels: [&'a [B]; P],
    per_sum: usize,
    zero: f32,
    /// The words of a group of `M` rows.
    words: &'a [u32],
    factors: &'a [Factors],
}

impl<B: Integers, const P: usize, const M: usize> Tile<'_, B, P, M> {
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "plain loops over arrays end up in registers")]
    fn sums<L: Lanes>(self, lanes: L) -> [[L::Float; M]; P] {
        let blocks = self.panels[0].len();
        // Parts with scales have sums of their own; other blocks have one part.
        let per_sum = if B::SCALED { 1 } else { self.per_sum };
        let parts = blocks * B::PARTS;
        assert!(self.panels.iter().all(|panel| panel.len() == blocks), "panels are equally long");
        assert!(self.words.len() == parts * B::DOTS * M, "rows are as long as panels");
        assert!(self.factors.len() * per_sum == parts * M, "each sum has factors");

        let mut totals = [[lanes.splat(0.0); M]; P];
        let mut sums = [[lanes.splat_sums(0); M]; P];
        for index in 0..blocks {
            let mut block = [&self.panels[0][index]; P];
            for panel in 0..P {
                // SAFETY: `index < blocks`, the length of every panel, see above.
                block[panel] = unsafe { self.panels[panel].get_unchecked(index) };
                prefetch(lanes, block[panel]);
            }
            for part in 0..B::PARTS {
                let at = index * B::PARTS + part;
                if B::SCALED || at.is_multiple_of(per_sum) {
                    for row in 0..M {
                        // SAFETY: `at < parts`, so that `at / per_sum` is below the number of factors of a row.
                        let start = unsafe { self.factors.get_unchecked(at / per_sum * M + row) }.start;
                        for panel in 0..P {
                            sums[panel][row] = lanes.splat_sums(start);
                        }
                    }
                }
                for word in 0..B::DOTS {
                    for panel in 0..P {
                        let weights = block[panel].bytes(lanes, part, word);
                        for row in 0..M {
                            // SAFETY: `at < parts` and `word < DOTS`, see above.
                            let x = unsafe { *self.words.get_unchecked((at * B::DOTS + word) * M + row) };
                            if B::SMALL {
                                sums[panel][row] = lanes.dot::<true>(sums[panel][row], weights, x);
                            } else {
                                sums[panel][row] = lanes.dot::<false>(sums[panel][row], weights, x);
                            }
                        }
                    }
                }
                if !B::SCALED && !(at + 1).is_multiple_of(per_sum) {
                    continue;
                }
                for panel in 0..P {
                    let (scale, mut offset) = block[panel].affine(lanes, part);
                    if B::OFFSET_HAS_ZERO {
                        // The sum is without the zero already. Zeros of whole matrices are powers of two, or scales are, so that
                        // nothing is rounded.
                        offset = lanes.mul_add(scale, lanes.splat(self.zero), offset);
                    }
                    for row in 0..M {
                        // SAFETY: as above.
                        let factors = unsafe { self.factors.get_unchecked(at / per_sum * M + row) };
                        let mut factor = lanes.splat(factors.scale);
                        if B::SCALED {
                            factor = lanes.mul(factor, scale);
                        }
                        let total = &mut totals[panel][row];
                        *total = lanes.mul_add(lanes.sums_to_float(sums[panel][row]), factor, *total);
                        if B::OFFSET {
                            *total = lanes.mul_add(offset, lanes.splat(factors.offset), *total);
                        }
                    }
                }
            }
        }
        totals
    }
}
