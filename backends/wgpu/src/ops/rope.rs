//! Rotary position embedding.

use super::launch::{CallPlan, Launch, Value};
use dsrun_core::{
    Error, Result,
    kernels::CallDesc,
    op::{Rope, RopePairing},
};

pub(super) const SOURCE: &str = include_str!("../../kernels/rope.wgsl");

pub(super) fn rope(op: &Rope, call: &CallDesc) -> Result<CallPlan> {
    let features = call.results.first().and_then(|y| y.shape.get(1).copied());
    let pairs = call.tensor(2).and_then(|frequencies| frequencies.shape.first().copied());
    let (Some(features), Some(pairs)) = (features, pairs) else {
        return Err(Error::internal("rope has no features or no frequencies"));
    };
    let launch = Launch::of_elements(SOURCE, "rope", call)?.operand("x", call, 0)?;
    let launch = launch.operand("positions", call, 1)?.operand("frequencies", call, 2)?;
    let launch = launch.size("head", features / (op.heads as usize).max(1))?.size("pairs", pairs)?;
    let launch = launch.param("scale", Value::F32(op.scale));
    Ok(launch.flag("ROPE", true).flag("HALVES", op.pairing == RopePairing::Halves).into())
}
