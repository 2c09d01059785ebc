//! Mixtures of experts: the router, the grouping of assignments, and the weighted sum.

use super::launch::{CallPlan, Launch, Value};
use crate::driver::adapter::DeviceSpec;
use dsrun_core::{
    Error, Result,
    kernels::CallDesc,
    op::{GroupScore, MoeCombine, MoeGroup, MoeRoute, RouterNorm, RouterScore},
};

const SOURCE: &str = include_str!("../../kernels/moe.wgsl");

/// Words of workgroup memory of the router besides those of experts, groups and slots.
const ROUTER_WORDS: usize = 2 * 64 + 8;

pub(super) fn route(op: &MoeRoute, call: &CallDesc, spec: &DeviceSpec) -> Result<CallPlan> {
    let shape = call.tensor(0).map(|logits| logits.shape.as_slice());
    let Some(&[rows, experts]) = shape else { return Err(Error::internal("the logits are not a matrix")) };
    let (groups, slots) = (op.groups as usize, op.top_k as usize);
    let needed = 4 * (3 * experts + 2 * (groups + slots) + ROUTER_WORDS);
    let limit = spec.limits.max_compute_workgroup_storage_size as usize;
    if needed > limit {
        let message =
            format!("{experts} experts need {needed} bytes of workgroup memory, the adapter has {limit}");
        return Err(Error::unsupported(message).at("logits").field("shape[1]"));
    }
    let mut launch = Launch::new(SOURCE, "moe_route").reducing(true).groups(rows);
    let constants = [("EXPERTS", experts as u32), ("GROUPS", op.groups), ("SLOTS", op.top_k)];
    launch.shader.constants.extend(constants);
    for (index, name) in ["logits", "bias", "selection_bias", "expert_scale", "ids"].into_iter().enumerate() {
        launch = launch.operand(name, call, index)?;
    }
    let launch = launch.result("experts", call, 0)?.result("weights", call, 1)?;
    let launch = launch.param("top_groups", Value::U32(op.top_groups)).param("eps", Value::F32(op.eps));
    let launch = launch.param("scale", Value::F32(op.scale)).param("threshold", Value::F32(op.threshold));
    let by_logit = matches!(op.score, RouterScore::SoftmaxOfSelected | RouterScore::SparseMixer);
    let compare_logits = by_logit || (op.groups == 1 && call.tensor(2).is_none());
    let flags = [
        ("ROUTE", true),
        ("IDS", call.tensor(4).is_some()),
        // Logits have the same order as scores, which may round to equal numbers.
        ("COMPARE_LOGITS", compare_logits),
        ("GROUPED", op.top_groups < op.groups),
        ("TOP_TWO", op.group_score == GroupScore::TopTwoSum),
        ("SOFTMAX", op.score == RouterScore::Softmax),
        ("SIGMOID", op.score == RouterScore::Sigmoid),
        ("BY_LOGIT", by_logit),
        ("SCORED", !by_logit),
        ("OF_SELECTED", op.score == RouterScore::SoftmaxOfSelected),
        ("SPARSE_MIXER", op.score == RouterScore::SparseMixer),
        ("NORM", op.norm != RouterNorm::None),
        ("CLAMPED", op.norm == RouterNorm::ClampedSum),
    ];
    Ok(flags.into_iter().fold(launch, |launch, (flag, set)| launch.flag(flag, set)).into())
}

pub(super) fn group(op: &MoeGroup, call: &CallDesc) -> Result<CallPlan> {
    let slots = call.tensor(0).and_then(|experts| experts.shape.get(1).copied()).unwrap_or(0);
    let launch = Launch::new(SOURCE, "moe_group").groups(op.count as usize + 1);
    let launch = launch.operand("experts", call, 0)?.result("order", call, 0)?;
    let launch = launch.result("starts", call, 1)?.size("slots", slots)?;
    let launch = launch.param("count", Value::U32(op.count));
    Ok(launch.param("first_expert", Value::U32(op.first_expert)).flag("GROUP", true).into())
}

pub(super) fn combine(op: &MoeCombine, call: &CallDesc) -> Result<CallPlan> {
    let slots = call.tensor(2).and_then(|experts| experts.shape.get(1).copied()).unwrap_or(0);
    let launch = Launch::of_elements(SOURCE, "moe_combine", call)?.operand("x", call, 0)?;
    let launch = launch.operand("weights", call, 1)?.operand("experts", call, 2)?.size("slots", slots)?;
    let launch = launch.param("count", Value::U32(op.count));
    Ok(launch.param("first_expert", Value::U32(op.first_expert)).flag("COMBINE", true).into())
}
