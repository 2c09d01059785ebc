//! Fused kernels for the regions that core has names for. Every other region is core's to lower.

use super::{
    KernelSpec, Machine, Recipe, WIDE,
    linear::{Layer, Places, weight_type},
    norm, operand, result, type_name,
};
use crate::{
    context::Context,
    launch::{Bound, Frame, Function, Parameters, Step},
};
use dsrun_core::{
    Error, Result, TensorDesc,
    kernels::CallDesc,
    op::{Linear, Op, RmsNorm},
    region::{Region, well_known},
};
use std::sync::Arc;

pub(super) fn recipe(region: &Region, call: &CallDesc, machine: &Machine) -> Result<Recipe> {
    if let [first, second] = region.calls() {
        match (&first.op, &second.op) {
            (Op::Add(add), Op::RmsNorm(norm)) if *region == well_known::add_rms_norm(*add, *norm)? => {
                return norm::add_rms_norm(add, norm, call);
            }
            (Op::RmsNorm(norm), Op::Linear(Linear { dtype })) => {
                for bias in [false, true] {
                    if *region == well_known::norm_linear(*norm, *dtype, bias)? {
                        return norm_linear(norm, bias, call, machine);
                    }
                }
            }
            _ => {}
        }
    }
    let ops: Vec<&str> = region.calls().iter().map(|call| call.op.name()).collect();
    Err(Error::unsupported(format!("CUDA has no fused kernel for a body of {}", ops.join(", "))))
}

/// `y = linear(rms_norm(x, norm_weight), weight, bias)`: one kernel for few rows, else the two after another, with the
/// normed activations in scratch memory.
fn norm_linear(op: &RmsNorm, bias: bool, call: &CallDesc, machine: &Machine) -> Result<Recipe> {
    let (x, gain, y) = (operand(call, 0)?, operand(call, 1)?, result(call, 0)?);
    let weight = weight_type(call, 2)?;
    let bias = if bias { Some(operand(call, 3)?.dtype) } else { None };
    let mut layer =
        Layer { x, weight, y, bias, norm: Some((*op, gain.dtype)), residual: None, scratch: false };
    if layer.takes_norm() && gain.shape == [weight.columns()] {
        let layered = layer.plan(machine)?;
        let kernels = layered.kernels.clone();
        let steps = Box::new(move |frame: &Frame, functions: &[Arc<Function>], context: &Context| {
            let (x, y) = (frame.tensor(0)?, frame.result(0)?);
            if y.size(0) == 0 || y.size(1) == 0 {
                return Ok(Vec::new());
            }
            let places = Places {
                x,
                weight: frame.weight(2)?,
                bias: frame.address(3),
                gain: frame.address(1),
                residual: None,
                y,
                bounds: &[x, y],
                workspace: frame.workspace,
            };
            layered.steps(&places, functions, context)
        });
        return Ok(Recipe { kernels, workspace: 0, persistent: 0, batch_invariant: true, steps });
    }
    // Rows of the normed activations start at multiples of 16 bytes, for the kernels behind.
    let stride = (x.shape[1] * x.dtype.bytes()).next_multiple_of(16) / x.dtype.bytes();
    let mut normed = TensorDesc::dense(x.dtype, &x.shape);
    normed.strides[0] = stride;
    normed.bounded = x.bounded;
    let normed_bytes = (x.shape[0] * stride * x.dtype.bytes()).next_multiple_of(256);
    layer.x = &normed;
    layer.norm = None;
    let layered = layer.plan(machine)?;
    let wide = norm::wide_norm(x, &normed, gain.shape[0]);
    let norm_spec: KernelSpec = norm::rms_norm_spec(type_name(x.dtype)?, type_name(gain.dtype)?, wide);
    let mut kernels = vec![norm_spec];
    kernels.extend(layered.kernels.iter().cloned());
    let (workspace, batch_invariant, op) = (normed_bytes + layered.workspace, layered.batch_invariant, *op);
    let steps = Box::new(move |frame: &Frame, functions: &[Arc<Function>], context: &Context| {
        let (x, gain, y) = (frame.tensor(0)?, frame.tensor(1)?, frame.result(0)?);
        let (rows, columns, width) = (x.size(0), x.size(1), gain.size(0));
        if rows == 0 || y.size(1) == 0 {
            return Ok(Vec::new());
        }
        let [first, rest @ ..] = functions else { return Err(Error::internal("a recipe without a kernel")) };
        let between = Bound { desc: normed.clone(), address: frame.workspace, extent: x.extent };
        let parameters =
            Parameters::default().extent(rows, &[x, y]).size(width).float(op.eps).float(op.weight_offset);
        let parameters = parameters.rows(x).address(gain.address).rows(&between);
        let threads = norm::threads(if wide { width / WIDE } else { width });
        let mut steps: Vec<Step> =
            Step::kernel(first, norm::grid(rows, columns, width), threads, parameters).into_iter().collect();
        let places = Places {
            x: &between,
            weight: frame.weight(2)?,
            bias: frame.address(3),
            gain: 0,
            residual: None,
            y,
            bounds: &[x, y],
            workspace: frame.workspace + normed_bytes as u64,
        };
        steps.extend(layered.steps(&places, rest, context)?);
        Ok(steps)
    });
    Ok(Recipe { kernels, workspace, persistent: 0, batch_invariant, steps })
}
