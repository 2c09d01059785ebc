//! Quantisation of activations, and the linear layers over quantised activations.

use super::linear::{Source, add_bias, finish_rows, grow, multiply};
use crate::{
    floats::{FloatFrame, FloatRows, FloatsMut},
    kernel::Kernel,
    packed::{PackedMatrix, QuantisedRow},
    parallel::{Lane, Worker},
    simd,
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

impl Kernel for QuantPerToken {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let x = frame.floats(0)?;
        let (mut y, mut scales) = (frame.output::<i8>(0)?, frame.output::<f32>(1)?);
        let rows = x.rows.min(y.rows).min(scales.rows);
        let [scratch] = worker.team.lane().split([x.row_scratch()]);
        for row in 0..rows {
            *scales.at_mut(row) = simd::quantise(x.row(row, scratch), y.row_mut(row));
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
            groups.zip(scales).for_each(|((x, y), scale)| *scale = simd::quantise(x, y));
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
    let in_place = matches!(y.data, FloatsMut::F32(_)) && y.is_dense(rows);
    let at_once = if in_place { rows } else { (HELD / outputs).max(16).min(rows) };
    for first in (0..rows).step_by(at_once) {
        let count = at_once.min(rows - first);
        let x: Vec<QuantisedRow<'_>> = (first..first + count).map(&row).collect();
        if let (true, FloatsMut::F32(data)) = (in_place, &mut y.data) {
            let out = &mut data[..rows * outputs];
            weight.multiply_integers(&x, out, worker.team.pool)?;
            add_bias(out, bias, outputs);
        } else {
            grow(worker.outputs, at_once * outputs);
            let out = &mut worker.outputs[..count * outputs];
            weight.multiply_integers(&x, out, worker.team.pool)?;
            finish_rows(out, bias, first, &mut y);
        }
    }
    Ok(())
}
