//! Penalties on logits, the largest element of a row, and drawing tokens.

use super::{CallPlan, launch::Launch};
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

/// A dispatch with a workgroup for each row of operand 0, a matrix of `columns` columns.
fn of_rows(entry: &'static str, call: &CallDesc) -> Result<Launch> {
    let shape = call.tensor(0).map(|logits| logits.shape.as_slice());
    let Some(&[rows, columns]) = shape else { return Err(Error::internal("the logits are not a matrix")) };
    Launch::new(SOURCE, entry).groups(rows).flag("ROWS", true).size("columns", columns)
}

pub(super) fn argmax(call: &CallDesc) -> Result<CallPlan> {
    let launch = of_rows("argmax", call)?.operand("x", call, 0)?.result("ids", call, 0)?;
    Ok(launch.flag("ARGMAX", true).into())
}

pub(super) fn sample(call: &CallDesc) -> Result<CallPlan> {
    let mut launch = of_rows("sample", call)?;
    let operands = ["logits", "requests", "positions", "parameters", "seeds"];
    for (index, name) in operands.into_iter().enumerate() {
        launch = launch.operand(name, call, index)?;
    }
    let launch = launch.result("ids", call, 0)?.result("log_probability", call, 1)?;
    Ok(launch.flag("SAMPLE", true).into())
}
