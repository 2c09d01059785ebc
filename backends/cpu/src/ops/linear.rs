//! Linear layers.

use crate::{
    floats::{FloatFrame, FloatOutput, FloatRows, Floats, FloatsMut},
    kernel::Kernel,
    packed::{PackedMatrix, RowRange},
    parallel::{Lane, Worker},
};
use dsrun_core::{
    Result,
    kernels::PackedWeight,
    op::{HeadLinear, Linear},
};
use dsrun_host::{Frame, Tensor};

/// Elements of widened activations and unrounded results that are held at a time.
pub(super) const HELD: usize = 8 << 20;

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

impl Kernel for HeadLinear {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (x, weight) = (frame.floats(0)?, frame.weight::<PackedMatrix>(1)?);
        let mut y = frame.floats_mut(0)?;
        let (rows, heads) = (x.rows.min(y.rows), (self.heads as usize).max(1));
        let (inputs, outputs) = (weight.weight_type().columns(), weight.weight_type().rows() / heads);
        let (head, result) = (x.width() / heads, y.width() / heads);
        let range_of = |head: usize| head * outputs..(head + 1) * outputs;
        let padded = weight.padded_inputs();
        let widest = (0..heads).map(|head| weight.covered(&range_of(head)).len()).max().unwrap_or(outputs);
        let of_row = heads.saturating_mul(padded.saturating_add(widest)).max(1);
        let at_once = (HELD / of_row).max(16).min(rows).max(1);
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            // The rows of one head after those of another.
            let all = heads * count;
            grow(worker.inputs, all * padded);
            grow(worker.outputs, all * widest);
            let (shape, strides) = ([all, padded], [padded, 1]);
            let data = FloatsMut::F32(&mut worker.inputs[..all * padded]);
            let held = Tensor { data, shape: &shape, strides: &strides, rows: all };
            held.fill_rows(&mut worker.team, all, 2, |index, out, _: &mut Lane| {
                let start = x.row_start(first + index % count) + index / count * head;
                x.data.widen(start, &mut out[..inputs]);
                out[inputs..].fill(0.0);
            });
            let (mut ranges, mut xs) = (Vec::new(), &worker.inputs[..all * padded]);
            let mut outs = &mut worker.outputs[..all * widest];
            for head in 0..heads {
                let covered = weight.covered(&range_of(head)).len();
                let (x, other_xs) = xs.split_at(count * padded);
                let (out, other_outs) = std::mem::take(&mut outs).split_at_mut(count * widest);
                ranges.push(RowRange { rows: range_of(head), x, out: &mut out[..count * covered] });
                (xs, outs) = (other_xs, other_outs);
            }
            weight.multiply_ranges(ranges, worker.team.pool)?;
            let [scratch] = worker.team.lane().split([x.data.scratch(head - inputs)]);
            for number in 0..heads {
                let (range, covered) = (range_of(number), weight.covered(&range_of(number)));
                for row in 0..count {
                    let products = &worker.outputs[number * count * widest + row * covered.len()..];
                    let products = &products[range.start - covered.start..][..outputs];
                    let start = y.row_start(first + row) + number * result;
                    y.data.store(start, products);
                    let rest = x.row_start(first + row) + number * head + inputs;
                    y.data.store(start + outputs, x.data.range(rest, head - inputs, scratch));
                }
            }
        }
        Ok(())
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
        add_bias(out, bias, outputs);
        if !in_place {
            for (row, values) in worker.outputs.chunks_exact(outputs).take(count).enumerate() {
                let start = y.row_start(first + row);
                y.data.store(start, values);
            }
        }
    }
    Ok(())
}

/// Adds the bias, if there is one, to rows of `width` results.
pub(super) fn add_bias(out: &mut [f32], bias: Option<&[f32]>, width: usize) {
    if let Some(bias) = bias {
        for row in out.chunks_exact_mut(width) {
            row.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
        }
    }
}

/// Adds the bias to rows of results, and stores them from row `first` of `y` on.
pub(super) fn finish_rows(
    out: &mut [f32],
    bias: Option<&[f32]>,
    first: usize,
    y: &mut Tensor<'_, FloatsMut<'_>>,
) {
    add_bias(out, bias, y.width());
    for (row, values) in out.chunks_exact(y.width()).enumerate() {
        let start = y.row_start(first + row);
        y.data.store(start, values);
    }
}

pub(super) fn grow(scratch: &mut Vec<f32>, length: usize) {
    if scratch.len() < length {
        scratch.resize(length, 0.0);
    }
}
