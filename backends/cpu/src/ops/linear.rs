//! Matrix products.

use crate::{
    floats::{FloatFrame, FloatOutput, FloatRows, Floats, FloatsMut},
    kernel::Kernel,
    packed::PackedMatrix,
    parallel::{Lane, Worker},
};
use dsrun_core::{
    Result,
    kernels::PackedWeight,
    op::{Linear, Matmul},
};
use dsrun_host::{Frame, Tensor};

/// Elements of widened activations and unrounded results that are held at a time.
const HELD: usize = 8 << 20;

impl Kernel for Linear {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (x, weight) = (frame.floats(0)?, frame.weight::<PackedMatrix>(1)?);
        let (bias, y) = (frame.optional_floats(2)?, frame.floats_mut(0)?);
        let rows = x.rows.min(y.rows);
        let widen = |row: usize, out: &mut [f32], _: &mut Lane| x.data.widen(x.row_start(row), out);
        let source = match x.data {
            Floats::F32(data) if x.is_dense(rows) => Source::Dense(data),
            _ => Source::Rows(widen),
        };
        multiply(weight, bias.as_ref(), &source, rows, y, worker)
    }
}

/// The source of the activations of a linear layer.
pub(super) enum Source<'a, F> {
    /// Rows in memory, back to back.
    Dense(&'a [f32]),
    /// A function that computes each row when it is needed.
    Rows(F),
}

/// `y = x . weight + bias` for the first `rows` rows.
pub(super) fn multiply<F: Fn(usize, &mut [f32], &mut Lane) + Sync>(
    weight: &PackedMatrix,
    bias: Option<&Tensor<'_, Floats<'_>>>,
    source: &Source<'_, F>,
    rows: usize,
    mut y: Tensor<'_, FloatsMut<'_>>,
    worker: &mut Worker<'_>,
) -> Result<()> {
    let (inputs, outputs) = (weight.weight_type().columns(), y.width());
    let in_place = matches!(y.data, FloatsMut::F32(_)) && y.is_dense(rows);
    if rows == 0 || outputs == 0 {
        return Ok(());
    }
    let bias = bias.map(|bias| bias.vector(&mut worker.vectors[0]));
    let at_once = match source {
        Source::Dense(_) if in_place => rows,
        _ => (HELD / inputs.saturating_add(outputs).max(1)).max(16).min(rows),
    };
    for first in (0..rows).step_by(at_once) {
        let count = at_once.min(rows - first);
        let x = match source {
            Source::Dense(data) => &data[first * inputs..][..count * inputs],
            Source::Rows(make) => {
                grow(worker.inputs, count * inputs);
                let (shape, strides) = ([count, inputs], [inputs, 1]);
                let data = FloatsMut::F32(&mut worker.inputs[..count * inputs]);
                let held = Tensor { data, shape: &shape, strides: &strides, rows: count };
                held.fill_rows(&mut worker.team, count, 2, |row, out, lane| make(first + row, out, lane));
                &worker.inputs[..count * inputs]
            }
        };
        let out = match &mut y.data {
            FloatsMut::F32(data) if in_place => &mut data[first * outputs..][..count * outputs],
            _ => {
                grow(worker.outputs, count * outputs);
                &mut worker.outputs[..count * outputs]
            }
        };
        weight.multiply(x, count, out, worker.team.pool)?;
        if let Some(bias) = bias {
            for row in out.chunks_exact_mut(outputs) {
                row.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
            }
        }
        if !in_place {
            for (row, values) in worker.outputs.chunks_exact(outputs).take(count).enumerate() {
                let start = y.row_start(first + row);
                y.data.store(start, values);
            }
        }
    }
    Ok(())
}

/// Adds the bias to rows of results, and stores them from row `first` of `y` on.
pub(super) fn finish_rows(
    out: &mut [f32],
    bias: Option<&[f32]>,
    first: usize,
    y: &mut Tensor<'_, FloatsMut<'_>>,
) {
    for (row, values) in out.chunks_exact_mut(y.width()).enumerate() {
        if let Some(bias) = bias {
            values.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
        }
        let start = y.row_start(first + row);
        y.data.store(start, values);
    }
}

fn grow(scratch: &mut Vec<f32>, length: usize) {
    if scratch.len() < length {
        scratch.resize(length, 0.0);
    }
}

impl Kernel for Matmul {
    /// Packs the right operand of each group as the weight of a linear layer, and multiplies by that.
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (a, b, mut y) = (frame.floats(0)?, frame.floats(1)?, frame.floats_mut(0)?);
        let groups = a.rows.min(b.rows).min(y.rows);
        let (&[_, m, inner], &[_, _, n]) = (a.shape, y.shape) else { return Ok(()) };
        if m == 0 || n == 0 {
            return Ok(());
        }
        let mut product = vec![0.0; m * n];
        for group in 0..groups {
            let right = dense_matrix(&b, group);
            let right = if self.transpose_b { right } else { transposed(&right, n) };
            let weight = PackedMatrix::from_rows(&right, [n, inner], worker.team.pool)?;
            weight.multiply(&dense_matrix(&a, group), m, &mut product, worker.team.pool)?;
            for (row, values) in product.chunks_exact(n).enumerate() {
                y.data.store(group * y.strides[0] + row * y.strides[1], values);
            }
        }
        Ok(())
    }
}

/// The rows of matrix `group` of a batch, back to back.
fn dense_matrix(batch: &Tensor<'_, Floats<'_>>, group: usize) -> Vec<f32> {
    let (rows, columns) = (batch.shape[1], batch.shape[2]);
    let mut values = vec![0.0; rows * columns];
    for (row, out) in values.chunks_exact_mut(columns.max(1)).enumerate() {
        batch.data.widen(group * batch.strides[0] + row * batch.strides[1], out);
    }
    values
}

/// The columns of a dense matrix of `columns` columns, back to back.
fn transposed(matrix: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| matrix.iter().skip(column).step_by(columns)).copied().collect()
}
