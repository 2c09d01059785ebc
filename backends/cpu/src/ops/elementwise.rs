//! Elementwise sums, casts, and slices of columns.

use crate::{
    floats::{FloatFrame, FloatOutput, FloatRows},
    kernel::Kernel,
    parallel::Worker,
};
use dsrun_core::{
    Result,
    op::{Add, Cast, Columns},
};
use dsrun_host::Frame;

impl Kernel for Add {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (a, b, c) = (frame.floats(0)?, frame.floats(1)?, frame.optional_floats(2)?);
        let bias = frame.optional_floats(3)?;
        let bias = bias.as_ref().map(|bias| bias.vector(&mut worker.vectors[0]));
        let rows = c.as_ref().map_or(usize::MAX, |c| c.rows).min(a.rows).min(b.rows);
        frame.floats_mut(0)?.fill_rows(&mut worker.team, rows, 1, |row, out, lane| {
            let [scratch] = lane.split([a.row_scratch()]);
            add_row(self.alpha, a.row(row, scratch), bias, |out| b.data.widen(b.row_start(row), out), out);
            if let Some(c) = &c {
                out.iter_mut().zip(c.row(row, scratch)).for_each(|(out, c)| *out += c);
            }
        });
        Ok(())
    }
}

/// `out = a + alpha * (b + bias)`; `load` writes `b`.
pub(super) fn add_row(
    alpha: f32,
    a: &[f32],
    bias: Option<&[f32]>,
    load: impl FnOnce(&mut [f32]),
    out: &mut [f32],
) {
    load(out);
    if let Some(bias) = bias {
        out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
    }
    out.iter_mut().zip(a).for_each(|(out, a)| *out = a + alpha * *out);
}

impl Kernel for Cast {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        if frame.operand_dtype(0)? == self.dtype {
            return copy_columns(frame, 0);
        }
        let x = frame.floats(0)?;
        frame.floats_mut(0)?.fill_rows(&mut worker.team, x.rows, 1, |row, out, _| {
            x.data.widen(x.row_start(row), out);
        });
        Ok(())
    }
}

impl Kernel for Columns {
    fn run(&self, frame: &Frame<'_>, _: &mut Worker<'_>) -> Result<()> {
        copy_columns(frame, self.start as usize)
    }
}

/// Copies as many columns as the result has, from column `first` of the operand on.
fn copy_columns(frame: &Frame<'_>, first: usize) -> Result<()> {
    let (x, mut y) = (frame.bytes(0)?, frame.bytes_mut(0)?);
    let width = y.width();
    for row in 0..x.rows.min(y.rows) {
        let start = y.row_start(row);
        y.data.range_mut(start, width).copy_from_slice(x.data.range(x.row_start(row) + first, width));
    }
    Ok(())
}
