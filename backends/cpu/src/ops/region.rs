//! Fused kernels for the well-known regions of `dsrun-core`. Core lowers every other region.

use super::{
    elementwise::add_row,
    linear::{Source, multiply},
    norm::{layer_norm_row, rms_norm_row},
};
use crate::{
    floats::{FloatFrame, FloatOutput, FloatRows},
    kernel::Kernel,
    packed::PackedMatrix,
    parallel::{Lane, Worker},
};
use dsrun_core::{
    Error, Result,
    op::{Add, Linear, Op, RmsNorm},
    region::{
        Region,
        well_known::{self, Norm},
    },
};
use dsrun_host::Frame;

/// The kernel for a region, found by its body.
pub(crate) fn kernel(region: &Region) -> Result<Box<dyn Kernel>> {
    if let [first, second] = region.calls() {
        match (&first.op, &second.op) {
            (Op::Add(add), Op::RmsNorm(norm)) if *region == well_known::add_rms_norm(*add, *norm)? => {
                return Ok(Box::new(AddRmsNorm { add: *add, norm: *norm }));
            }
            (norm, Op::Linear(Linear { dtype })) => {
                for bias in [false, true] {
                    let Some(norm) = Norm::of(norm) else { break };
                    if *region == well_known::norm_linear(norm, *dtype, bias)? {
                        return Ok(Box::new(NormLinear { norm, bias }));
                    }
                }
            }
            _ => {}
        }
    }
    let ops: Vec<&str> = region.calls().iter().map(|call| call.op.name()).collect();
    Err(Error::unsupported(format!("the CPU backend has no fused kernel for a body of {}", ops.join(", "))))
}

/// `r = a + alpha * b`, `y = rms_norm(r, weight)`: the norm reads the sum before it is rounded.
#[derive(Debug)]
struct AddRmsNorm {
    add: Add,
    norm: RmsNorm,
}

impl Kernel for AddRmsNorm {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (a, b, weight) = (frame.floats(0)?, frame.floats(1)?, frame.floats(2)?);
        let weight = weight.vector(&mut worker.vectors[0]);
        let (sums, normed) = (frame.floats_mut(0)?, frame.floats_mut(1)?);
        let (rows, width) = (a.rows.min(b.rows).min(sums.rows).min(normed.rows), a.width());
        if width == 0 {
            return Ok(());
        }
        let add = |row: usize, scratch: &mut [f32], out: &mut [f32]| {
            let load = |out: &mut [f32]| b.data.widen(b.row_start(row), out);
            add_row(self.add.alpha, a.row(row, scratch), None, load, out);
        };
        let (sums, normed) = (sums.share(), normed.share());
        worker.team.for_each(rows, width.saturating_mul(4), |row, lane| {
            // The sum is made twice rather than kept: it is cheap, and its operands are in the cache.
            //
            // SAFETY: `for_each` gives each row to one call, and rows do not overlap.
            unsafe {
                sums.data.write(sums.row_start(row), width, lane, |out, lane| {
                    let [scratch] = lane.split([width]);
                    add(row, scratch, out);
                });
                normed.data.write(normed.row_start(row), width, lane, |out, lane| {
                    let [scratch, sum] = lane.split([width, width]);
                    add(row, scratch, sum);
                    rms_norm_row(&self.norm, sum, weight, out);
                });
            }
        });
        Ok(())
    }
}

/// `y = linear(norm(x), weight, bias)`: the normed activations are never rounded.
#[derive(Debug)]
struct NormLinear {
    norm: Norm,
    bias: bool,
}

impl Kernel for NormLinear {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let weight_index = 1 + self.norm.vectors();
        let (x, weight, y) =
            (frame.floats(0)?, frame.weight::<PackedMatrix>(weight_index)?, frame.floats_mut(0)?);
        let bias = if self.bias { frame.optional_floats(weight_index + 1)? } else { None };
        let rows = x.rows.min(y.rows);
        // `multiply` keeps the bias of the product in the first vector.
        let [_, weights, biases] = &mut worker.vectors;
        let (mut weights, mut biases) = (std::mem::take(weights), std::mem::take(biases));
        let norm_weight = frame.floats(1)?;
        let norm_weight = norm_weight.vector(&mut weights);
        let done = match &self.norm {
            Norm::Rms(norm) => {
                let make = |row: usize, out: &mut [f32], lane: &mut Lane| {
                    let [scratch] = lane.split([x.row_scratch()]);
                    rms_norm_row(norm, x.row(row, scratch), norm_weight, out);
                };
                multiply(weight, bias.as_ref(), &Source::Rows(make), rows, y, worker)
            }
            Norm::Layer(norm) => {
                let norm_bias = frame.floats(2)?;
                let norm_bias = norm_bias.vector(&mut biases);
                let make = |row: usize, out: &mut [f32], lane: &mut Lane| {
                    let [scratch] = lane.split([x.row_scratch()]);
                    layer_norm_row(norm, x.row(row, scratch), Some(norm_weight), Some(norm_bias), out);
                };
                multiply(weight, bias.as_ref(), &Source::Rows(make), rows, y, worker)
            }
        };
        (worker.vectors[1], worker.vectors[2]) = (weights, biases);
        done
    }
}
