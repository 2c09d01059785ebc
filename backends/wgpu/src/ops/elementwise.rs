//! Sums, casts, slices of columns, gathered rows.

use super::launch::{CallPlan, Launch, Value};
use dsrun_core::{
    Result,
    kernels::CallDesc,
    op::{Add, Columns},
};

const SOURCE: &str = include_str!("../../kernels/elementwise.wgsl");

pub(super) fn add(op: &Add, call: &CallDesc) -> Result<CallPlan> {
    let launch = Launch::of_elements(SOURCE, "add", call)?.operand("a", call, 0)?.operand("b", call, 1)?;
    let launch = launch.operand("c", call, 2)?.operand("bias", call, 3)?;
    Ok(launch.param("alpha", Value::F32(op.alpha)).flag("ADD", true).into())
}

pub(super) fn cast(call: &CallDesc) -> Result<CallPlan> {
    let same = call.tensor(0).zip(call.results.first()).is_some_and(|(x, y)| x.dtype == y.dtype);
    let launch = Launch::of_elements(SOURCE, "convert", call)?.operand("x", call, 0)?;
    Ok(launch.flag("CAST", true).flag("SAME", same).into())
}

pub(super) fn columns(op: &Columns, call: &CallDesc) -> Result<CallPlan> {
    let launch = Launch::of_elements(SOURCE, "take_columns", call)?.operand("x", call, 0)?;
    Ok(launch.param("start", Value::U32(op.start)).flag("COLUMNS", true).into())
}

pub(super) fn gather_rows(call: &CallDesc) -> Result<CallPlan> {
    let launch =
        Launch::of_elements(SOURCE, "gather_rows", call)?.operand("x", call, 0)?.operand("rows", call, 1)?;
    Ok(launch.flag("GATHER", true).into())
}
