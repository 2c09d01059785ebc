//! Linear layers over dense and quantised weights.

use super::{CallPlan, launch::Launch};
use dsrun_core::{Error, Result, kernels::CallDesc};

const SOURCE: &str = include_str!("../../kernels/linear.wgsl");

/// The largest number of rows for which the weight is read once for each 4 rows instead of once for each tile of 64.
const FEW_ROWS: usize = 8;

pub(super) fn linear(call: &CallDesc) -> Result<CallPlan> {
    let Some((x, y)) = call.tensor(0).zip(call.results.first()) else {
        return Err(Error::internal("linear has no x or no result"));
    };
    let (&[rows, outputs], Some(&inputs)) = (y.shape.as_slice(), x.shape.get(1)) else {
        return Err(Error::internal("x and the result of linear are not matrices"));
    };
    let few = rows <= FEW_ROWS;
    let (entry, groups) = if few {
        ("linear_few", outputs.saturating_mul(rows.div_ceil(4)))
    } else {
        ("linear_many", outputs.div_ceil(64).saturating_mul(rows.div_ceil(64)))
    };
    let vectors =
        inputs.is_multiple_of(4) && x.strides.first().is_some_and(|stride| stride.is_multiple_of(4));
    let launch = Launch::new(SOURCE, entry).groups(groups);
    let launch = if vectors { launch.vectors("x", call, 0)? } else { launch.operand("x", call, 0)? };
    let launch = launch.weight("w", call, 1)?.operand("bias", call, 2)?.result("y", call, 0)?;
    let launch = launch.size("inputs", inputs)?.size("outputs", outputs)?;
    Ok(launch.flag("VECTORS", vectors).flag("FEW", few).flag("MANY", !few).into())
}
