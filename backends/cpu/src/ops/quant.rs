//! Quantisation of activations, and the linear layers over quantised activations.

use super::linear::{Source, finish_rows, grow, multiply};
use crate::{
    floats::{FloatFrame, FloatRows},
    kernel::Kernel,
    packed::{PackedMatrix, QuantisedRow},
    parallel::{Lane, Worker},
};
use dsrun_core::{
    Result,
    op::{LinearA8, LinearW8A8, QuantPerGroup, QuantPerToken},
};
use dsrun_host::Frame;
use rayon::prelude::*;

/// Elements of results that are held at a time before they are rounded.
const HELD: usize = 4 << 20;

/// Elements below which waking other threads costs more than it saves.
const WORTH_SHARING: usize = 64 << 10;

/// Added to a number below 2^22 and taken off again, it rounds it to the nearest integer, ties to even: it is 1.5 * 2^23, where
/// numbers are one apart. Unlike `round_ties_even` that vectorises on every processor.
const ROUND: f32 = 12_582_912.0;

/// Quantises a row and gives its scale.
fn quantise(x: &[f32], out: &mut [i8]) -> f32 {
    let largest = x.iter().fold(0f32, |largest, x| if x.abs() > largest { x.abs() } else { largest });
    let scale = largest / 127.0;
    if scale == 0.0 {
        out.fill(0);
        return scale;
    }
    for (out, x) in out.iter_mut().zip(x) {
        // Clamped before it is rounded: that is the same, and `ROUND` needs it small.
        *out = (((x / scale).clamp(-127.0, 127.0) + ROUND) - ROUND) as i8;
    }
    scale
}

impl Kernel for QuantPerToken {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let x = frame.floats(0)?;
        let (mut y, mut scales) = (frame.output::<i8>(0)?, frame.output::<f32>(1)?);
        let rows = x.rows.min(y.rows).min(scales.rows);
        let [scratch] = worker.team.lane().split([x.row_scratch()]);
        for row in 0..rows {
            *scales.at_mut(row) = quantise(x.row(row, scratch), y.row_mut(row));
        }
        Ok(())
    }
}

impl Kernel for QuantPerGroup {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let x = frame.floats(0)?;
        let (y, scales) = (frame.output::<i8>(0)?, frame.output::<f32>(1)?);
        let (rows, group, width) = (x.rows.min(y.rows).min(scales.rows), self.group as usize, x.width());
        if rows == 0 || width == 0 {
            return Ok(());
        }
        let quantise_row = |scratch: &mut Vec<f32>, (row, (y, scales)): (usize, (&mut [i8], &mut [f32]))| {
            let groups = x.row(row, scratch).chunks_exact(group).zip(y.chunks_exact_mut(group));
            groups.zip(scales).for_each(|((x, y), scale)| *scale = quantise(x, y));
        };
        let (y_row, scales_row) = (y.row_stride(), scales.row_stride());
        let results = y.data.chunks_mut(y_row).zip(scales.data.chunks_mut(scales_row)).take(rows).enumerate();
        let scratch = || vec![0.0; x.row_scratch()];
        if rows.saturating_mul(width) < WORTH_SHARING {
            let mut scratch = scratch();
            results.for_each(|result| quantise_row(&mut scratch, result));
        } else {
            let results: Vec<_> = results.collect();
            let run = || results.into_par_iter().with_min_len(8).for_each_init(scratch, quantise_row);
            worker.team.pool.install(run);
        }
        Ok(())
    }
}

impl Kernel for LinearW8A8 {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (x, scales) = (frame.input::<i8>(0)?, frame.input::<f32>(1)?);
        let row =
            |row| QuantisedRow { integers: x.row(row), scales: &scales.data[row * scales.strides[0]..][..1] };
        multiply_integers(frame, x.rows.min(scales.rows), row, worker)
    }
}

impl Kernel for LinearA8 {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (x, scales) = (frame.input::<i8>(0)?, frame.input::<f32>(1)?);
        let (rows, group) = (x.rows.min(scales.rows), self.group as usize);
        let weight = frame.weight::<PackedMatrix>(2)?;
        if weight.multiplies_integers(group) {
            let row = |row| QuantisedRow { integers: x.row(row), scales: scales.row(row) };
            return multiply_integers(frame, rows, row, worker);
        }
        let (bias, y) = (frame.optional_floats(3)?, frame.floats_mut(0)?);
        let widen = |row: usize, out: &mut [f32], _: &mut Lane| {
            let groups = out.chunks_exact_mut(group).zip(x.row(row).chunks_exact(group));
            for ((out, x), scale) in groups.zip(scales.row(row)) {
                out.iter_mut().zip(x).for_each(|(out, x)| *out = f32::from(*x) * scale);
            }
        };
        multiply(weight, bias.as_ref(), &Source::Rows(widen), rows.min(y.rows), y, worker)
    }
}

/// `y = x . weight + bias` for the first `rows` rows of quantised activations; weight, bias and result are those of
/// [`LinearW8A8`] and [`LinearA8`].
fn multiply_integers<'a>(
    frame: &'a Frame<'_>,
    rows: usize,
    row: impl Fn(usize) -> QuantisedRow<'a>,
    worker: &mut Worker<'_>,
) -> Result<()> {
    let weight = frame.weight::<PackedMatrix>(2)?;
    let (bias, mut y) = (frame.optional_floats(3)?, frame.floats_mut(0)?);
    let (rows, outputs) = (rows.min(y.rows), y.width());
    if rows == 0 || outputs == 0 {
        return Ok(());
    }
    let bias = bias.as_ref().map(|bias| bias.vector(&mut worker.vectors[0]));
    let at_once = (HELD / outputs).max(16).min(rows);
    grow(worker.outputs, at_once * outputs);
    for first in (0..rows).step_by(at_once) {
        let count = at_once.min(rows - first);
        let x: Vec<QuantisedRow<'_>> = (first..first + count).map(&row).collect();
        let out = &mut worker.outputs[..count * outputs];
        weight.multiply_integers(&x, out, worker.team.pool)?;
        finish_rows(out, bias, first, &mut y);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::quantise;

    #[test]
    fn rounds_to_nearest_even_within_127() {
        let x = [127.0, 0.5, 1.5, 2.5, -0.5, -2.5, -126.5, 3.49, -127.0];
        let mut out = [1; 9];
        assert_eq!(quantise(&x, &mut out), 1.0);
        assert_eq!(out, [127, 0, 2, 2, 0, -2, -126, 3, -127]);
    }

    #[test]
    fn a_row_with_scale_0_is_zeros() {
        let mut out = [1; 3];
        assert_eq!(quantise(&[0.0, -0.0, 0.0], &mut out), 0.0);
        assert_eq!(out, [0; 3]);
        // The largest is so small that its 127th part is 0.
        assert_eq!(quantise(&[f32::from_bits(3), 0.0, 0.0], &mut out), 0.0);
        assert_eq!(out, [0; 3]);
    }
}
