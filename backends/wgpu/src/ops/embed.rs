//! Token embedding.

use super::launch::{CallPlan, Launch, Value};
use dsrun_core::{Result, kernels::CallDesc, op::Embed};

const SOURCE: &str = include_str!("../../kernels/embed.wgsl");

pub(super) fn embed(op: &Embed, call: &CallDesc) -> Result<CallPlan> {
    let launch = Launch::of_elements(SOURCE, "embed", call)?.operand("ids", call, 0)?;
    let launch = launch.weight("table", call, 1)?.operand("positions", call, 2)?;
    let launch = launch.weight("position_table", call, 3)?.param("first_row", Value::U32(op.first_row));
    Ok(launch.param("position_offset", Value::U32(op.position_offset)).into())
}
