//! Logit processing, argmax and sampling.

use super::launch::{CallPlan, Launch};
use dsrun_core::{Error, Result, kernels::CallDesc};

const SOURCE: &str = include_str!("../../kernels/sampling.wgsl");

pub(super) fn logit_process(call: &CallDesc) -> Result<CallPlan> {
    let mut launch = Launch::of_elements(SOURCE, "logit_process", call)?;
    let operands = ["logits", "requests", "parameters", "counts", "bias", "mask"];
    for (index, name) in operands.into_iter().enumerate() {
        launch = launch.operand(name, call, index)?;
    }
    Ok(launch.flag("PENALTIES", true).flag("MASK", call.tensor(5).is_some()).into())
}

/// Threads of a workgroup that processes a row of this many columns.
fn threads(columns: usize, limits: &wgpu::Limits) -> u32 {
    let wanted = match columns {
        0..=128 => 32,
        129..=8192 => 256,
        _ => 1024,
    };
    if wanted > limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x) {
        return 256;
    }
    wanted
}

/// A dispatch with a workgroup for each row of operand 0, a matrix of `columns` columns.
fn of_rows(entry: &'static str, call: &CallDesc, limits: &wgpu::Limits) -> Result<Launch> {
    let shape = call.tensor(0).map(|logits| logits.shape.as_slice());
    let Some(&[rows, columns]) = shape else { return Err(Error::internal("the logits are not a matrix")) };
    let mut launch = Launch::new(SOURCE, entry).groups(rows).flag("ROWS", true);
    let threads = threads(columns, limits);
    launch.shader.constants.extend([("THREADS", threads), ("BINS", 256 / threads.min(256))]);
    launch.size("columns", columns)
}

pub(super) fn argmax(call: &CallDesc, limits: &wgpu::Limits) -> Result<CallPlan> {
    let launch = of_rows("argmax", call, limits)?.operand("x", call, 0)?.result("ids", call, 0)?;
    Ok(launch.flag("ARGMAX", true).into())
}

pub(super) fn sample(call: &CallDesc, limits: &wgpu::Limits) -> Result<CallPlan> {
    let mut launch = of_rows("sample", call, limits)?;
    let operands = ["logits", "requests", "positions", "parameters", "seeds"];
    for (index, name) in operands.into_iter().enumerate() {
        launch = launch.operand(name, call, index)?;
    }
    let launch = launch.result("ids", call, 0)?.result("log_probability", call, 1)?;
    Ok(launch.reducing(false).flag("SAMPLE", true).into())
}
