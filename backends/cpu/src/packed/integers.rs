//! Products of quantised activations and integer weights, in integers.
//!
//! Four activations are one word, which is multiplied with four integers of all sixteen rows of a panel at once: one instruction
//! where the processor has VNNI, a few with AVX2. Integers of weights are unsigned: those of signed formats are stored with a zero
//! added, and the zero times the sum of the activations is subtracted from the sum. Intermediate sums may wrap
//! around; the result fits, so it is right.
//!
//! A sum covers one part of a block of weights that has a scale, or all activations that share a scale where blocks have no scales of their own. It is exact.
//! With the scales of both it is added to the f32 of the output, in the order of the inputs: a row's result depends neither on
//! the other rows nor on the threads.

use super::{
    panel::Integers,
    product::{Output, pieces},
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

/// Rows of quantised activations, as the kernel for one type of blocks reads them.
struct Activations {
    /// Four bytes each, in the order of [`Integers::DOTS`].
    words: Vec<u32>,
    /// Words of a row.
    width: usize,
    /// The factors of every sum: those of a row stand together.
    factors: Vec<Factors>,
    /// Sums of a row.
    sums: usize,
    rows: usize,
}

/// What the activations contribute to an output besides the products of integers.
#[derive(Clone, Copy, Default)]
struct Factors {
    /// The scale of the activations.
    scale: f32,
    /// The scaled sum of the activations, which the offset of weights is multiplied with.
    offset: f32,
    /// The start of the sum: what the zero of the weights adds to it is subtracted.
    start: i32,
}

impl Activations {
    /// Arranges rows for panels of `parts` parts, `per_sum` of which have a common sum.
    fn new<B: Integers>(
        rows: &[QuantisedRow<'_>],
        parts: usize,
        per_sum: usize,
        zero: i32,
        pool: &rayon::ThreadPool,
    ) -> Self {
        let (width, sums) = (parts * B::DOTS, parts / per_sum);
        let mut words = vec![0; rows.len() * width];
        let mut factors = vec![Factors::default(); rows.len() * sums];
        let fill = |((words, factors), row): ((&mut [u32], &mut [Factors]), &QuantisedRow<'_>)| {
            set_row::<B>(row, per_sum, zero, words, factors);
        };
        let targets = (words.chunks_mut(width.max(1)), factors.chunks_mut(sums.max(1)));
        if rows.len() * width < SMALLEST_TASK {
            targets.0.zip(targets.1).zip(rows).for_each(fill);
        } else {
            let targets: Vec<_> = targets.0.zip(targets.1).zip(rows).collect();
            pool.install(|| targets.into_par_iter().with_min_len(8).for_each(fill));
        }
        Self { words, width, factors, sums, rows: rows.len() }
    }

    fn words_of(&self, row: usize) -> &[u32] {
        &self.words[row * self.width..][..self.width]
    }

    fn factors_of(&self, row: usize) -> &[Factors] {
        &self.factors[row * self.sums..][..self.sums]
    }
}

/// Arranges a row for parts of blocks of type `B`, `per_sum` of which have a common sum.
fn set_row<B: Integers>(
    row: &QuantisedRow<'_>,
    per_sum: usize,
    zero: i32,
    words: &mut [u32],
    factors: &mut [Factors],
) {
    let length = per_sum * B::PART;
    let group = row.integers.len().div_ceil(row.scales.len().max(1)).max(1);
    for (sum, (factors, words)) in factors.iter_mut().zip(words.chunks_mut(per_sum * B::DOTS)).enumerate() {
        let first = sum * length;
        let integers = &row.integers[first..row.integers.len().min(first + length)];
        for (words, part) in words.chunks_mut(B::DOTS).zip(integers.chunks(B::PART)) {
            let mut bytes = [0u8; LONGEST_PART];
            bytes[..part.len()].copy_from_slice(bytemuck::cast_slice(part));
            for (word, out) in words.iter_mut().enumerate() {
                *out = u32::from_le_bytes([
                    bytes[word],
                    bytes[word + B::DOTS],
                    bytes[word + 2 * B::DOTS],
                    bytes[word + 3 * B::DOTS],
                ]);
            }
        }
        let total = integers.iter().map(|byte| i32::from(*byte)).sum::<i32>();
        let scale = row.scales[first / group];
        *factors = Factors { scale, offset: scale * total as f32, start: total.wrapping_mul(-zero) };
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
    let x = Activations::new::<B>(rows, blocks * B::PARTS, per_sum, zero, pool);
    let product = Product { panels, blocks, per_sum, zero, x: &x, out: Output::new(out, outputs) };
    let count = outputs.div_ceil(WIDTH);
    let work = outputs.saturating_mul(first.integers.len()).saturating_mul(x.rows);
    let tasks = (work / SMALLEST_TASK).clamp(1, pool.current_num_threads() * 2).min(count);
    let task = |index: usize| {
        let panels = count * index / tasks..count * (index + 1) / tasks;
        instructions.run(Panels { product: &product, panels });
    };
    if tasks == 1 {
        task(0);
    } else {
        pool.install(|| (0..tasks).into_par_iter().with_max_len(1).for_each(task));
    }
}

struct Product<'a, B> {
    panels: &'a [B],
    /// Blocks of a panel.
    blocks: usize,
    /// Parts of blocks of a sum.
    per_sum: usize,
    zero: i32,
    x: &'a Activations,
    out: Output<'a>,
}

/// The outputs of a range of panels.
struct Panels<'a, 'p, B> {
    product: &'a Product<'p, B>,
    panels: Range<usize>,
}

impl<B: Integers> Task for Panels<'_, '_, B> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        self.product.compute(lanes, self.panels);
    }
}

impl<B: Integers> Product<'_, B> {
    fn compute<L: Lanes>(&self, lanes: L, panels: Range<usize>) {
        if self.x.rows == 1 {
            // Two halves side by side, each from front to back: two streams of weights from memory.
            let half = panels.len() / 2;
            for panel in panels.start..panels.start + half {
                self.tile::<L, 2, 1>(lanes, [panel, panel + half], 0);
            }
            if panels.len() > 2 * half {
                self.tile::<L, 1, 1>(lanes, [panels.end - 1], 0);
            }
            return;
        }
        let slab = (SLAB_BYTES / (4 * self.x.width).max(1)).max(L::ROWS_INTEGERS);
        for rows in pieces(0..self.x.rows, slab) {
            for panel in panels.clone() {
                self.rows_of_panel(lanes, panel, rows.clone());
            }
        }
    }

    fn rows_of_panel<L: Lanes>(&self, lanes: L, panel: usize, rows: Range<usize>) {
        let mut row = rows.start;
        while row < rows.end {
            macro_rules! rows {
                ($count:literal) => {{
                    self.tile::<L, 1, $count>(lanes, [panel], row);
                    $count
                }};
            }
            row += match (rows.end - row).min(L::ROWS_INTEGERS) {
                1 => rows!(1),
                2 | 3 => rows!(2),
                4 | 5 => rows!(4),
                6 | 7 => rows!(6),
                8..12 => rows!(8),
                _ => rows!(12),
            };
        }
    }

    /// Computes sixteen outputs of `M` rows for each of `P` panels.
    fn tile<L: Lanes, const P: usize, const M: usize>(&self, lanes: L, panels: [usize; P], row: usize) {
        let sums = lanes.run(Tile {
            panels: panels.map(|panel| &self.panels[panel * self.blocks..][..self.blocks]),
            per_sum: self.per_sum,
            zero: self.zero as f32,
            x: std::array::from_fn::<_, M, _>(|m| self.x.words_of(row + m)),
            factors: std::array::from_fn(|m| self.x.factors_of(row + m)),
        });
        for (panel, sums) in panels.into_iter().zip(&sums) {
            for (m, sums) in sums.iter().enumerate() {
                // SAFETY: this task owns the panels.
                unsafe { self.out.add(row + m, panel, sums, true) };
            }
        }
    }
}

/// The sums of `P` panels for `M` rows, in the order of `[panel][row]`.
struct Tile<'a, B, const P: usize, const M: usize> {
    panels: [&'a [B]; P],
    per_sum: usize,
    zero: f32,
    x: [&'a [u32]; M],
    factors: [&'a [Factors]; M],
}

impl<B: Integers, const P: usize, const M: usize> Task for Tile<'_, B, P, M> {
    type Output = [[[f32; WIDTH]; M]; P];

    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "plain loops over arrays end up in registers")]
    fn run<L: Lanes>(self, lanes: L) -> Self::Output {
        let blocks = self.panels[0].len();
        // Parts with scales have sums of their own; other blocks have one part.
        let per_sum = if B::SCALED { 1 } else { self.per_sum };
        let parts = blocks * B::PARTS;
        assert!(self.panels.iter().all(|panel| panel.len() == blocks), "panels are equally long");
        assert!(self.x.iter().all(|x| x.len() == parts * B::DOTS), "rows are as long as panels");
        assert!(self.factors.iter().all(|factors| factors.len() * per_sum == parts), "each sum has factors");

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
                        // SAFETY: `at < parts`, so that `at / per_sum` is below the number of factors of every row.
                        let start = unsafe { self.factors[row].get_unchecked(at / per_sum) }.start;
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
                            let x = unsafe { *self.x[row].get_unchecked(at * B::DOTS + word) };
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
                        let factors = unsafe { self.factors[row].get_unchecked(at / per_sum) };
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
        let mut out = [[[0.0; WIDTH]; M]; P];
        for (out, total) in out.iter_mut().flatten().zip(totals.into_iter().flatten()) {
            lanes.store(total, out);
        }
        out
    }
}
