//! Token embedding.

use super::{
    launch::{CallPlan, Launch, Value},
    weight::{self, Layout},
};
use crate::driver::adapter::DeviceSpec;
use dsrun_core::{
    Result,
    kernels::{CallDesc, OperandDesc},
    op::Embed,
};

const SOURCE: &str = include_str!("../../kernels/embed.wgsl");

pub(super) fn embed(op: &Embed, call: &CallDesc, spec: &DeviceSpec) -> Result<CallPlan> {
    let parts = |index: usize| match call.operands.get(index) {
        Some(Some(OperandDesc::Weight(table))) => weight::parts(table, spec),
        _ => Ok(Vec::new()),
    };
    let positions = parts(3)?;
    let positions: Vec<Option<&Layout>> =
        if positions.is_empty() { vec![None] } else { positions.iter().map(Some).collect() };
    let mut plan = CallPlan::default();
    for (index, part) in parts(1)?.iter().enumerate() {
        for (position_index, position_part) in positions.iter().enumerate() {
            let launch = Launch::of_elements(SOURCE, "embed", call)?.operand("ids", call, 0)?;
            let launch = launch.weight_part("table", 1, index, Some(part))?;
            let launch = launch.operand("positions", call, 2)?;
            let launch = launch.weight_part("position_table", 3, position_index, *position_part)?;
            let launch = launch.param("first_row", Value::U32(op.first_row));
            let launch = launch.param("position_offset", Value::U32(op.position_offset));
            let launch = launch.flag("FURTHER", index > 0);
            plan.launches.push(launch.flag("FURTHER_POSITIONS", position_index > 0));
        }
    }
    Ok(plan)
}
