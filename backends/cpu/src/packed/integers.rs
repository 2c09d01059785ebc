//! Products of quantised activations: exact sums of products of bytes.
//!
//! Weights are [`Int8`] panels: a line holds four bytes of sixteen rows, each plus 128, so that they are unsigned. Of the
//! activations of a row four bytes are one word, which is multiplied with all sixteen rows at once: one instruction where the
//! processor has AVX-512 VNNI, a few with AVX2. `sum x * (q + 128)` exceeds the result by 128 times the sum of `x`, which is
//! subtracted at the end. Intermediate sums may wrap around; the result fits, so it is right.

#[cfg(target_arch = "x86_64")]
mod x86;

use super::{panel::Int8, product::Output};
use crate::lanes::WIDTH;
use rayon::prelude::*;
use std::ops::Range;

/// Bytes of a word.
const BYTES: usize = 4;

/// Rows of activations that share a pass over a panel.
const ROWS: usize = 8;

/// Multiplications below which a task is not worth handing to another thread.
const SMALLEST_TASK: usize = 128 << 10;

/// Rows of quantised activations, as kernels read them.
#[derive(Debug)]
pub(crate) struct Quantised {
    /// Four bytes each; the last word of a row is padded with zeros.
    words: Vec<u32>,
    /// Words of a row.
    width: usize,
    inputs: usize,
    /// The scale of each row.
    scales: Vec<f32>,
    /// The sum of each row.
    sums: Vec<i32>,
}

impl Quantised {
    /// No rows yet, with `inputs` columns.
    pub(crate) fn new(inputs: usize) -> Self {
        Self {
            words: Vec::new(),
            width: inputs.div_ceil(BYTES),
            inputs,
            scales: Vec::new(),
            sums: Vec::new(),
        }
    }

    /// Appends a row.
    pub(crate) fn push(&mut self, row: &[i8], scale: f32) {
        debug_assert_eq!(row.len(), self.inputs);
        self.words.extend(row.chunks(BYTES).map(|bytes| {
            bytes
                .iter()
                .enumerate()
                .fold(0, |word, (index, byte)| word | u32::from(*byte as u8) << (8 * index))
        }));
        self.sums.push(row.iter().map(|byte| i32::from(*byte)).sum());
        self.scales.push(scale);
    }

    /// The number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.scales.len()
    }

    /// The number of columns.
    pub(crate) fn inputs(&self) -> usize {
        self.inputs
    }

    fn row(&self, index: usize) -> &[u32] {
        &self.words[index * self.width..][..self.width]
    }
}

/// Instruction sets that have kernels.
#[derive(Clone, Copy, Debug)]
pub(super) enum Instructions {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    #[cfg(target_arch = "x86_64")]
    Vnni(x86::Vnni),
}

impl Instructions {
    /// Every set that this processor has, the best last.
    pub(super) fn available() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let more = [x86::Avx2::detect().map(Self::Avx2), x86::Vnni::detect().map(Self::Vnni)];
        #[cfg(not(target_arch = "x86_64"))]
        let more = [];
        [Some(Self::Portable)].into_iter().chain(more).flatten()
    }
}

/// Computes `out`, which is `[rows, scales.len()]`, from panels, the scales of their rows and activations.
pub(super) fn multiply(
    panels: &[Int8],
    scales: &[f32],
    x: &Quantised,
    out: &mut [f32],
    pool: &rayon::ThreadPool,
) {
    let best = Instructions::available().last().unwrap_or(Instructions::Portable);
    multiply_with(best, panels, scales, x, out, pool);
}

pub(super) fn multiply_with(
    instructions: Instructions,
    panels: &[Int8],
    scales: &[f32],
    x: &Quantised,
    out: &mut [f32],
    pool: &rayon::ThreadPool,
) {
    if x.rows() == 0 || scales.is_empty() || x.width == 0 {
        out.fill(0.0);
        return;
    }
    let product = Product { panels, scales, x, out: Output::new(out, scales.len()) };
    let count = scales.len().div_ceil(WIDTH);
    let work = scales.len().saturating_mul(x.inputs).saturating_mul(x.rows());
    let tasks = (work / SMALLEST_TASK).clamp(1, pool.current_num_threads() * 2).min(count);
    let task = |index: usize| {
        let range = count * index / tasks..count * (index + 1) / tasks;
        match instructions {
            Instructions::Portable => product.panels(range, &Portable),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2(lanes) => lanes.panels(&product, range),
            #[cfg(target_arch = "x86_64")]
            Instructions::Vnni(lanes) => lanes.panels(&product, range),
        }
    };
    if tasks == 1 {
        task(0);
    } else {
        pool.install(|| (0..tasks).into_par_iter().with_max_len(1).for_each(task));
    }
}

/// Sixteen sums at a time.
trait Lanes {
    /// Sixteen i32.
    type Sums: Copy;

    /// Sixteen zeros.
    fn zeros(&self) -> Self::Sums;

    /// Adds to each sum the products of four unsigned bytes of `weights` and the four signed bytes of `x`.
    fn add(&self, sums: Self::Sums, weights: &[u32; WIDTH], x: u32) -> Self::Sums;

    /// The sums.
    fn store(&self, sums: Self::Sums) -> [i32; WIDTH];
}

/// Plain Rust.
struct Portable;

impl Lanes for Portable {
    type Sums = [i32; WIDTH];

    #[inline(always)]
    fn zeros(&self) -> [i32; WIDTH] {
        [0; WIDTH]
    }

    #[inline(always)]
    fn add(&self, mut sums: [i32; WIDTH], weights: &[u32; WIDTH], x: u32) -> [i32; WIDTH] {
        let x = x.to_le_bytes().map(|byte| i32::from(byte as i8));
        for (sum, weight) in sums.iter_mut().zip(weights) {
            let q = |index: u32| (weight >> (8 * index) & 255) as i32;
            *sum = sum.wrapping_add(q(0) * x[0] + q(1) * x[1] + q(2) * x[2] + q(3) * x[3]);
        }
        sums
    }

    #[inline(always)]
    fn store(&self, sums: [i32; WIDTH]) -> [i32; WIDTH] {
        sums
    }
}

struct Product<'a> {
    panels: &'a [Int8],
    scales: &'a [f32],
    x: &'a Quantised,
    out: Output<'a>,
}

impl Product<'_> {
    /// Computes the outputs of a range of panels for all rows.
    #[inline(always)]
    fn panels<L: Lanes>(&self, panels: Range<usize>, lanes: &L) {
        for panel in panels {
            let mut row = 0;
            while row < self.x.rows() {
                row += match self.x.rows() - row {
                    1 => self.tile::<L, 1>(panel, row, lanes),
                    2..4 => self.tile::<L, 2>(panel, row, lanes),
                    4..ROWS => self.tile::<L, 4>(panel, row, lanes),
                    _ => self.tile::<L, ROWS>(panel, row, lanes),
                };
            }
        }
    }

    /// Computes sixteen outputs of `M` rows and returns `M`.
    #[inline(always)]
    fn tile<L: Lanes, const M: usize>(&self, panel: usize, row: usize, lanes: &L) -> usize {
        let lines = &self.panels[panel * self.x.width..][..self.x.width];
        let x: [&[u32]; M] = std::array::from_fn(|m| self.x.row(row + m));
        let mut sums = [lanes.zeros(); M];
        for (index, line) in lines.iter().enumerate() {
            for m in 0..M {
                sums[m] = lanes.add(sums[m], line.words(), x[m][index]);
            }
        }
        let scales = &self.scales[panel * WIDTH..];
        for (m, sums) in sums.into_iter().enumerate() {
            let too_much = self.x.sums[row + m].wrapping_mul(128);
            let mut y =
                lanes.store(sums).map(|sum| sum.wrapping_sub(too_much) as f32 * self.x.scales[row + m]);
            y.iter_mut().zip(scales).for_each(|(y, scale)| *y *= scale);
            // SAFETY: this task owns the panel.
            unsafe { self.out.add(row + m, panel, &y, true) };
        }
        M
    }
}
