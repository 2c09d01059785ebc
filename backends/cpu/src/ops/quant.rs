//! Quantisation of activations, and the linear layer over quantised activations.

use super::linear::finish_rows;
use crate::{
    floats::{FloatFrame, FloatRows},
    kernel::Kernel,
    packed::{PackedMatrix, Quantised},
    parallel::Worker,
};
use dsrun_core::{
    Result,
    op::{LinearW8A8, QuantPerToken},
};
use dsrun_host::Frame;

/// Elements of results that are held at a time before they are rounded.
const HELD: usize = 4 << 20;

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

impl Kernel for LinearW8A8 {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (x, scales, weight) =
            (frame.input::<i8>(0)?, frame.input::<f32>(1)?, frame.weight::<PackedMatrix>(2)?);
        let (bias, mut y) = (frame.optional_floats(3)?, frame.floats_mut(0)?);
        let (rows, outputs) = (x.rows.min(scales.rows).min(y.rows), y.width());
        if rows == 0 || outputs == 0 {
            return Ok(());
        }
        let bias = bias.as_ref().map(|bias| bias.vector(&mut worker.vectors[0]));
        let at_once = (HELD / outputs).max(16).min(rows);
        if worker.outputs.len() < at_once * outputs {
            worker.outputs.resize(at_once * outputs, 0.0);
        }
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            let mut quantised = Quantised::new(x.width());
            (first..first + count).for_each(|row| quantised.push(x.row(row), scales.at(row)));
            let out = &mut worker.outputs[..count * outputs];
            weight.multiply_quantised(&quantised, out, worker.team.pool)?;
            finish_rows(out, bias, first, &mut y);
        }
        Ok(())
    }
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
