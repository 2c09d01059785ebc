//! Rotary position embedding.

use crate::{
    floats::{FloatFrame, FloatOutput},
    kernel::Kernel,
    parallel::Worker,
};
use dsrun_core::{
    Result,
    op::{Rope, RopePairing},
};
use dsrun_host::Frame;

impl Kernel for Rope {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (x, positions, frequencies) = (frame.floats(0)?, frame.input::<i32>(1)?, frame.input::<f32>(2)?);
        let frequencies = frequencies.row(0);
        let (width, pairs) = (x.width(), frequencies.len());
        let head = (width / (self.heads as usize).max(1)).max(1);
        let rows = x.rows.min(positions.rows);
        let wanted = |row: usize| positions.at(row) >= 0;
        // A sine and a cosine cost far more than rotating a pair, but are shared by all heads.
        let cost = 4 + 40 * pairs / width.max(1);
        frame.floats_mut(0)?.fill_rows_if(&mut worker.team, rows, cost, wanted, |row, out, lane| {
            let [sines, cosines] = lane.split([pairs, pairs]);
            let position = positions.at(row) as f32;
            for ((sine, cosine), frequency) in sines.iter_mut().zip(&mut *cosines).zip(frequencies) {
                (*sine, *cosine) = (position * frequency).sin_cos();
            }
            x.data.widen(x.row_start(row), out);
            for head in out.chunks_exact_mut(head) {
                rotate_pairs(head, self.pairing, self.scale, sines, cosines);
            }
        });
        Ok(())
    }
}

/// Rotates the pairs of one head.
fn rotate_pairs(head: &mut [f32], pairing: RopePairing, scale: f32, sines: &[f32], cosines: &[f32]) {
    let rotate = |p: &mut f32, q: &mut f32, sine: f32, cosine: f32| {
        (*p, *q) = (scale * (*p * cosine - *q * sine), scale * (*q * cosine + *p * sine));
    };
    let angles = sines.iter().zip(cosines);
    match pairing {
        RopePairing::Halves => {
            let (first, second) = head.split_at_mut(sines.len());
            for ((p, q), (sine, cosine)) in first.iter_mut().zip(second).zip(angles) {
                rotate(p, q, *sine, *cosine);
            }
        }
        RopePairing::Neighbours => {
            for ([p, q], (sine, cosine)) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                rotate(p, q, *sine, *cosine);
            }
        }
    }
}
