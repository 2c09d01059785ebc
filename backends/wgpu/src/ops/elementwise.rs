//! Sums, casts, slices of columns, gathered rows.

use super::{
    CallPlan,
    launch::{Launch, Value},
};
use dsrun_core::{
    Error, Result,
    kernels::CallDesc,
    op::{Add, Columns},
};

const SOURCE: &str = include_str!("../../kernels/elementwise.wgsl");

/// Threads of a workgroup; each makes one element.
const THREADS: usize = 64;

/// A dispatch with a thread for each element of result 0, a matrix.
fn of_elements(entry: &'static str, call: &CallDesc) -> Result<Launch> {
    let shape = call.results.first().map(|result| result.shape.as_slice());
    let Some(&[rows, columns]) = shape else { return Err(Error::internal("the result is not a matrix")) };
    let elements = rows.checked_mul(columns).ok_or_else(|| Error::unsupported("too many elements"))?;
    Launch::new(SOURCE, entry)
        .groups(elements.div_ceil(THREADS))
        .result("y", call, 0)?
        .size("columns", columns)
}

pub(super) fn add(op: &Add, call: &CallDesc) -> Result<CallPlan> {
    let launch = of_elements("add", call)?.operand("a", call, 0)?.operand("b", call, 1)?;
    let launch = launch.operand("c", call, 2)?.operand("bias", call, 3)?;
    Ok(launch.param("alpha", Value::F32(op.alpha)).flag("ADD", true).into())
}

pub(super) fn cast(call: &CallDesc) -> Result<CallPlan> {
    let same = call.tensor(0).zip(call.results.first()).is_some_and(|(x, y)| x.dtype == y.dtype);
    let launch = of_elements("convert", call)?.operand("x", call, 0)?;
    Ok(launch.flag("CAST", true).flag("SAME", same).into())
}

pub(super) fn columns(op: &Columns, call: &CallDesc) -> Result<CallPlan> {
    let launch = of_elements("take_columns", call)?.operand("x", call, 0)?;
    Ok(launch.param("start", Value::U32(op.start)).flag("COLUMNS", true).into())
}

pub(super) fn gather_rows(call: &CallDesc) -> Result<CallPlan> {
    let launch = of_elements("gather_rows", call)?.operand("x", call, 0)?.operand("rows", call, 1)?;
    Ok(launch.flag("GATHER", true).into())
}
