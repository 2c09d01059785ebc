//! Root-mean-square and layer norms.

use super::launch::{CallPlan, Launch, Value};
use dsrun_core::{
    Error, Result,
    kernels::CallDesc,
    op::{LayerNorm, RmsNorm},
};

const SOURCE: &str = include_str!("../../kernels/norm.wgsl");

/// A dispatch with a workgroup for each group of `width` features of a row.
fn of_groups(entry: &'static str, call: &CallDesc, width: usize) -> Result<Launch> {
    let shape = call.results.first().map(|result| result.shape.as_slice());
    let Some(&[rows, features]) = shape else { return Err(Error::internal("the result is not a matrix")) };
    let groups = features / width.max(1);
    Launch::new(SOURCE, entry)
        .reducing(false)
        .groups(rows.saturating_mul(groups))
        .operand("x", call, 0)?
        .operand("weight", call, 1)?
        .result("y", call, 0)?
        .size("width", width)?
        .size("groups", groups)
}

pub(super) fn rms_norm(op: &RmsNorm, call: &CallDesc) -> Result<CallPlan> {
    let weight = call.tensor(1).and_then(|weight| weight.shape.first().copied());
    let width = weight.ok_or_else(|| Error::internal("rms_norm has no weight"))?;
    let launch = of_groups("rms_norm", call, width)?.param("eps", Value::F32(op.eps));
    Ok(launch.param("weight_offset", Value::F32(op.weight_offset)).flag("RMS", true).into())
}

pub(super) fn layer_norm(op: &LayerNorm, call: &CallDesc) -> Result<CallPlan> {
    let width = call.results.first().and_then(|y| y.shape.get(1).copied()).unwrap_or(0);
    let launch = of_groups("layer_norm", call, width)?.operand("bias", call, 2)?;
    Ok(launch.param("eps", Value::F32(op.eps)).flag("LAYER", true).into())
}
