//! The request table: deriving a step's inputs, recording its tokens.

use super::launch::{CallPlan, Launch, Value};
use dsrun_core::{Error, Result, kernels::CallDesc, op::PrepareStep};

const SOURCE: &str = include_str!("../../kernels/step.wgsl");

/// The number of columns of a result that is a matrix.
fn columns(call: &CallDesc, index: usize) -> Result<usize> {
    let columns = call.results.get(index).and_then(|result| result.shape.get(1).copied());
    columns.ok_or_else(|| Error::internal(format!("result {index} is not a matrix")))
}

pub(super) fn prepare_step(op: &PrepareStep, call: &CallDesc) -> Result<CallPlan> {
    let mut launch = Launch::new(SOURCE, "prepare_step").groups(1).flag("PREPARE", true);
    let operands = [
        "step_request",
        "step_length",
        "step_source",
        "prompt_ids",
        "rows",
        "block_table",
        "last_token",
        "finished",
    ];
    for (index, name) in operands.into_iter().enumerate() {
        launch = launch.operand(name, call, index)?;
    }
    let results = [
        "ids",
        "positions",
        "slots",
        "query_start",
        "query_length",
        "kv_length",
        "tables",
        "row_positions",
        "lengths",
        "counts",
    ];
    for (index, name) in results.into_iter().enumerate() {
        launch = launch.result(name, call, index)?;
    }
    let launch = launch.size("blocks", columns(call, 6)?)?.size("vocabulary", columns(call, 9)?)?;
    Ok(launch.param("block", Value::U32(op.block_size)).into())
}

pub(super) fn commit_tokens(call: &CallDesc) -> Result<CallPlan> {
    let rows = call.tensor(0).and_then(|requests| requests.shape.first().copied()).unwrap_or(0);
    let mut launch = Launch::new(SOURCE, "commit_tokens").elements(rows).flag("COMMIT", true);
    for (index, name) in ["requests", "ids", "stop_ids"].into_iter().enumerate() {
        launch = launch.operand(name, call, index)?;
    }
    for (index, name) in ["last_token", "finished", "counts"].into_iter().enumerate() {
        launch = launch.result(name, call, index)?;
    }
    Ok(launch.size("vocabulary", columns(call, 2)?)?.into())
}
