//! Norms over the features of a row.

use crate::{
    floats::{FloatFrame, FloatOutput, FloatRows},
    kernel::Kernel,
    parallel::Worker,
    simd::{dot, sum},
};
use dsrun_core::{
    Result,
    op::{LayerNorm, RmsNorm},
};
use dsrun_host::Frame;

/// Norms every group of `weight.len()` elements of a row.
pub(super) fn rms_norm_row(op: &RmsNorm, x: &[f32], weight: &[f32], out: &mut [f32]) {
    let width = weight.len().max(1);
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let factor = 1.0 / (dot(x, x) / width as f32 + op.eps).sqrt();
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * factor * (weight + op.weight_offset);
        }
    }
}

/// Norms a row.
pub(super) fn layer_norm_row(
    op: &LayerNorm,
    x: &[f32],
    weight: Option<&[f32]>,
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    let features = x.len() as f32;
    let mean = sum(x) / features;
    out.iter_mut().zip(x).for_each(|(out, x)| *out = x - mean);
    let factor = 1.0 / (dot(out, out) / features + op.eps).sqrt();
    out.iter_mut().for_each(|out| *out *= factor);
    if let Some(weight) = weight {
        out.iter_mut().zip(weight).for_each(|(out, weight)| *out *= weight);
    }
    if let Some(bias) = bias {
        out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
    }
}

impl Kernel for RmsNorm {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (x, weight) = (frame.floats(0)?, frame.floats(1)?);
        let weight = weight.vector(&mut worker.vectors[0]);
        frame.floats_mut(0)?.fill_rows(&mut worker.team, x.rows, 2, |row, out, lane| {
            let [scratch] = lane.split([x.row_scratch()]);
            rms_norm_row(self, x.row(row, scratch), weight, out);
        });
        Ok(())
    }
}

impl Kernel for LayerNorm {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (x, weight, bias) = (frame.floats(0)?, frame.optional_floats(1)?, frame.optional_floats(2)?);
        let [weights, biases, _] = worker.vectors;
        let weight = weight.as_ref().map(|weight| weight.vector(weights));
        let bias = bias.as_ref().map(|bias| bias.vector(biases));
        frame.floats_mut(0)?.fill_rows(&mut worker.team, x.rows, 4, |row, out, lane| {
            let [scratch] = lane.split([x.row_scratch()]);
            layer_norm_row(self, x.row(row, scratch), weight, bias, out);
        });
        Ok(())
    }
}
