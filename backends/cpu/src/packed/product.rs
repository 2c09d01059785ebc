//! The product of a packed matrix with activations: the order of its tiles, and their threads.

use super::{
    panel::{Block, F32},
    tile::{Decode, STRIP, Source, Tile},
};
use crate::lanes::{InstructionSet, Lanes, Task, WIDTH};
use bytemuck::Zeroable;
use rayon::prelude::*;
use std::{marker::PhantomData, ops::Range};

/// Weights (times rows) below which a task is not worth handing to another thread: a few microseconds of work.
const SMALLEST_TASK: usize = 32 << 10;

/// Rows of activations in a slab, enough that decoding the weights once per slab costs little.
const SLAB_ROWS: usize = 96;

/// Inputs of such a slab, a whole number of strips: 384 KiB in all.
const SLAB_INPUTS: usize = 4 * STRIP;

/// A packed matrix and the activations it is multiplied with. Neither is empty.
pub(super) struct Product<'a, B> {
    /// The panels, back to back.
    pub(super) blocks: &'a [B],
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    /// `[rows, inputs]`.
    pub(super) x: &'a [f32],
    pub(super) rows: usize,
}

/// A product and the memory of its result, `[rows, outputs]`.
pub(super) struct Job<'a, B> {
    pub(super) product: Product<'a, B>,
    pub(super) out: Output<'a>,
}

impl<B: Block> Job<'_, B> {
    fn run(&self, instructions: InstructionSet, panels: Range<usize>) {
        instructions.run_floats(Panels { job: self, panels });
    }
}

/// A range of panels of a job.
struct Panels<'a, 'j, B> {
    job: &'a Job<'j, B>,
    panels: Range<usize>,
}

impl<B: Block> Task for Panels<'_, '_, B> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        self.job.product.panels(lanes, self.panels, &self.job.out);
    }
}

/// Computes all results. The jobs share the threads of the pool.
pub(super) fn run_all<B: Block>(jobs: &[Job<'_, B>], instructions: InstructionSet, pool: &rayon::ThreadPool) {
    let work = |job: &Job<'_, B>| {
        let Product { outputs, inputs, rows, .. } = job.product;
        outputs.saturating_mul(inputs).saturating_mul(rows)
    };
    let all = jobs.iter().map(work).fold(0, usize::saturating_add);
    // Two tasks per thread balance the load at little cost when other processes use the machine.
    let task_work = (all / (pool.current_num_threads() * 2)).max(SMALLEST_TASK);
    let tasks_of = |job| {
        let panels = job_panels(job);
        let tasks = (work(job) / task_work).clamp(1, panels);
        (0..tasks).map(move |index| (job, panels * index / tasks..panels * (index + 1) / tasks))
    };
    let tasks: Vec<(&Job<'_, B>, Range<usize>)> = jobs.iter().flat_map(tasks_of).collect();
    let run = |(job, panels): (&Job<'_, B>, Range<usize>)| job.run(instructions, panels);
    if tasks.len() < 2 {
        tasks.into_iter().for_each(run);
    } else {
        pool.install(|| tasks.into_par_iter().with_max_len(1).for_each(run));
    }
}

fn job_panels<B>(job: &Job<'_, B>) -> usize {
    job.product.outputs.div_ceil(WIDTH)
}

impl<B: Block> Product<'_, B> {
    /// Computes the outputs of a range of panels.
    fn panels<L: Lanes>(&self, lanes: L, panels: Range<usize>, out: &Output<'_>) {
        if self.rows == 1 {
            // Two halves side by side, each from front to back: two streams of weights from memory.
            let half = panels.len() / 2;
            for panel in panels.start..panels.start + half {
                self.row_of_panels(lanes, [panel, panel + half], out);
            }
            if panels.len() > 2 * half {
                self.row_of_panels(lanes, [panels.end - 1], out);
            }
        } else if self.rows <= 2 * rows_at_once::<L, B>() {
            // Decoding the weights twice costs less than storing the decoded weights and loading them again.
            for panel in panels {
                for strip in strips(0..self.inputs) {
                    let weights = self.strip_of(panel, &strip);
                    self.rows_of_panel(lanes, weights, Source::Memory, 0..self.rows, panel, &strip, out);
                }
            }
        } else {
            // Slabs of activations stay in the L2 cache for all panels, and the sums of a panel in the L1 cache.
            let mut decoded = vec![F32::zeroed(); STRIP.min(self.inputs)];
            for rows in pieces(0..self.rows, SLAB_ROWS) {
                for slab in pieces(0..self.inputs, SLAB_INPUTS) {
                    for panel in panels.clone() {
                        for strip in strips(slab.clone()) {
                            let packed = self.strip_of(panel, &strip);
                            let (weights, source) = match B::decoded(packed) {
                                Some(weights) => (weights, Source::Memory),
                                None => {
                                    let weights = &mut decoded[..strip.len()];
                                    lanes.run(Decode { panel: packed, weights: &mut *weights });
                                    (&*weights, Source::Decoded)
                                }
                            };
                            self.rows_of_panel(lanes, weights, source, rows.clone(), panel, &strip, out);
                        }
                    }
                }
            }
        }
    }

    /// A panel's blocks for a range of inputs.
    fn strip_of(&self, panel: usize, strip: &Range<usize>) -> &[B] {
        let first = panel * (self.inputs / B::LENGTH);
        &self.blocks[first + strip.start / B::LENGTH..first + strip.end / B::LENGTH]
    }

    /// Computes a range of rows of a strip, as many at a time as the registers hold.
    #[expect(clippy::too_many_arguments, reason = "a strip has as many coordinates")]
    fn rows_of_panel<L: Lanes, W: Block>(
        &self,
        lanes: L,
        weights: &[W],
        source: Source,
        rows: Range<usize>,
        panel: usize,
        strip: &Range<usize>,
        out: &Output<'_>,
    ) {
        let mut row = rows.start;
        while row < rows.end {
            let left = (rows.end - row).min(rows_at_once::<L, W>());
            macro_rules! rows {
                ($count:literal) => {{
                    let x = std::array::from_fn(|m| self.x_of(row + m, strip));
                    let sums = lanes.run(Tile::<W, 1, $count> { panels: [weights], x, source });
                    for (m, sums) in sums[0].iter().enumerate() {
                        // SAFETY: this task owns the panel.
                        unsafe { out.add(row + m, panel, sums, strip.start == 0) };
                    }
                    $count
                }};
            }
            row += match left {
                1 => rows!(1),
                2 => rows!(2),
                3 => rows!(3),
                4 | 5 => rows!(4),
                6 | 7 => rows!(6),
                8..12 => rows!(8),
                _ => rows!(12),
            };
        }
    }

    /// Computes the only row of `P` panels.
    fn row_of_panels<L: Lanes, const P: usize>(&self, lanes: L, panels: [usize; P], out: &Output<'_>) {
        for strip in strips(0..self.inputs) {
            let weights = panels.map(|panel| self.strip_of(panel, &strip));
            let sums = lanes.run(Tile { panels: weights, x: [self.x_of(0, &strip)], source: Source::Memory });
            for (panel, [sums]) in panels.into_iter().zip(&sums) {
                // SAFETY: this task owns the panels.
                unsafe { out.add(0, panel, sums, strip.start == 0) };
            }
        }
    }

    fn x_of(&self, row: usize, strip: &Range<usize>) -> &[f32] {
        &self.x[row * self.inputs..][strip.clone()]
    }
}

/// Rows that share a pass over weights of this kind.
fn rows_at_once<L: Lanes, B: Block>() -> usize {
    if B::STEPS > 1 { L::ROWS_DECODING } else { L::ROWS }
}

/// The ranges of inputs that are summed up separately.
fn strips(inputs: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    pieces(inputs, STRIP)
}

/// Cuts a range into runs of equal size; the last may be shorter.
pub(super) fn pieces(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let Range { start, end } = range;
    (start..end).step_by(size).map(move |start| start..(start + size).min(end))
}

/// The result matrix, shared by tasks that each own some of its columns.
pub(super) struct Output<'a> {
    start: *mut f32,
    rows: usize,
    outputs: usize,
    borrowed: PhantomData<&'a mut [f32]>,
}

// SAFETY: `add` asks its callers to keep to their own panels, and panels have no element in common.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    pub(super) fn new(out: &'a mut [f32], outputs: usize) -> Self {
        Self { start: out.as_mut_ptr(), rows: out.len() / outputs, outputs, borrowed: PhantomData }
    }

    /// Where the outputs of a panel are, to be prefetched.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for the tiles of AMX"))]
    #[inline(always)]
    pub(super) fn address(&self, row: usize, panel: usize) -> *const f32 {
        self.start.wrapping_add(row * self.outputs + panel * WIDTH)
    }

    /// Sets the outputs of a panel, sixteen or fewer.
    ///
    /// # Safety
    /// No other thread sets or adds to this panel at the same time.
    #[inline(always)]
    pub(super) unsafe fn set(&self, row: usize, panel: usize, sums: &[f32; WIDTH]) {
        // SAFETY: by the caller's promise.
        let out = unsafe { self.of_panel(row, panel) };
        match out.first_chunk_mut() {
            Some(out) => *out = *sums,
            None => out.copy_from_slice(&sums[..out.len()]),
        }
    }

    /// Adds sums to the outputs of a panel, sixteen or fewer, or sets them if these are the first sums.
    ///
    /// # Safety
    /// No other thread adds to this panel at the same time.
    pub(super) unsafe fn add(&self, row: usize, panel: usize, sums: &[f32; WIDTH], first: bool) {
        // SAFETY: by the caller's promise.
        let out = unsafe { self.of_panel(row, panel) };
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = if first { *sum } else { *out + *sum };
        }
    }

    /// The outputs of a panel.
    ///
    /// # Safety
    /// No other thread uses those of this panel at the same time, nor does this one have them already.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "tasks share the result and have panels of their own")]
    unsafe fn of_panel(&self, row: usize, panel: usize) -> &mut [f32] {
        let column = panel * WIDTH;
        assert!(row < self.rows && column < self.outputs, "a tile is inside the result");
        let count = WIDTH.min(self.outputs - column);
        // SAFETY: the elements are inside the slice that `self` borrows, by the assertion, and no other task touches
        // this panel's.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.outputs + column), count) }
    }
}
