//! Quantised activations, and linear layers over them.

use super::{
    launch::{CallPlan, Launch},
    linear::{Tiling, UNIT, threads_of_few},
    weight,
};
use crate::driver::adapter::DeviceSpec;
use dsrun_core::{
    Error, Result,
    kernels::{CallDesc, OperandDesc},
};

const SOURCE: &str = include_str!("../../kernels/quant.wgsl");

pub(super) fn quant_per_token(call: &CallDesc) -> Result<CallPlan> {
    let shape = call.tensor(0).map(|x| x.shape.as_slice());
    let Some(&[rows, columns]) = shape else { return Err(Error::internal("x is not a matrix")) };
    let launch = Launch::new(SOURCE, "quant_per_token").reducing(true).groups(rows).operand("x", call, 0)?;
    let launch = launch.result("y", call, 0)?.result("scales", call, 1)?.size("columns", columns)?;
    Ok(launch.flag("QUANTISE", true).into())
}

pub(super) fn linear_w8a8(call: &CallDesc, spec: &DeviceSpec) -> Result<CallPlan> {
    let Some((x, Some(Some(OperandDesc::Weight(weight_type))))) =
        call.tensor(0).zip(Some(call.operands.get(2)))
    else {
        return Err(Error::internal("linear_w8a8 has no x or no weight"));
    };
    let &[rows, inputs] = x.shape.as_slice() else { return Err(Error::internal("x is not a matrix")) };
    let aligned = x.strides.first().is_some_and(|stride| stride.is_multiple_of(4));
    let mut plan = CallPlan::default();
    for (index, part) in weight::parts(weight_type, spec)?.iter().enumerate() {
        let tiling = Tiling::new(rows, part.first / UNIT, part.rows.div_ceil(UNIT));
        let entry = if tiling.few { "linear_w8a8_few" } else { "linear_w8a8_many" };
        let mut launch = tiling.apply(Launch::new(SOURCE, entry).groups(tiling.groups))?;
        if tiling.few {
            let threads = threads_of_few(part, tiling.at_once);
            launch.shader.constants.extend([("THREADS", threads), ("ROWS", tiling.at_once as u32)]);
            launch = launch.reducing(false);
        }
        let launch = launch.operand("x", call, 0)?.words().operand("scales", call, 1)?;
        let launch = launch.weight_part("w", 2, index, Some(part))?.operand("bias", call, 3)?;
        let launch = launch.result("y", call, 0)?.size("inputs", inputs)?;
        let launch = launch.size("outputs", weight_type.rows())?;
        plan.launches.push(launch.flag("PRODUCT", true).flag("ALIGNED", aligned));
    }
    Ok(plan)
}
