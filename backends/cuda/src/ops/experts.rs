//! Mixture of experts: the router, the grouping of assignments, the linear layers of experts and the weighted sum.

mod linear;
mod mixture;

use crate::{
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{Pointer, declaration, kernel_struct, params_header},
        launch::{LaunchOp, MAX_GRID},
    },
    ops::{
        KernelPlan, THREADS, WIDE, operand,
        params::{ExtentParams, MatrixParams},
        plane, result, type_of, wide,
    },
};
use dsrun_core::{
    Error, Result,
    kernels::CallDesc,
    op::{GroupScore, MoeCombine, MoeGroup, MoeRoute, RouterNorm},
};
use std::fmt::Display;

pub(super) use linear::grouped_linear;
pub(super) use mixture::region;

/// The most experts that a router chooses among: their logits and keys are in the shared memory of a block.
const MAX_EXPERTS: usize = 2048;
/// Experts of a thread of a warp that owns a token; of more, several warps do.
const OWN_EXPERTS: usize = 16;
/// Threads of a block of `moe_route` whose tokens have a warp each.
const ROUTE_THREADS: usize = 128;
/// Threads of a block of `moe_group`.
const GROUP_THREADS: usize = 256;
/// The most assignments of a step.
const MAX_ASSIGNMENTS: usize = 1 << 30;

kernel_struct! {
    /// Parameters of `moe_route`.
    struct MoeRouteParams {
        extent: ExtentParams = "Extent",
        logits: MatrixParams = "Matrix<const X>",
        /// May be null.
        bias: Pointer = "const float*",
        /// May be null.
        selection_bias: Pointer = "const float*",
        /// May be null.
        expert_scale: Pointer = "const float*",
        /// Experts that are chosen in advance; absent if the router chooses.
        ids: MatrixParams = "Matrix<const int>",
        experts: MatrixParams = "Matrix<int>",
        weights: MatrixParams = "Matrix<float>",
        expert_count: i64 = "i64",
        /// Experts of a token.
        slots: i64 = "i64",
        groups: i64 = "i64",
        top_groups: i64 = "i64",
        eps: f32 = "float",
        scale: f32 = "float",
        threshold: f32 = "float",
    }
}

kernel_struct! {
    /// Parameters of `moe_group`.
    struct MoeGroupParams {
        extent: ExtentParams = "Extent",
        experts: MatrixParams = "Matrix<const int>",
        order: MatrixParams = "Matrix<int>",
        starts: Pointer = "int*",
        /// Experts of the device, and the index of the first.
        count: i64 = "i64",
        first_expert: i64 = "i64",
    }
}

kernel_struct! {
    /// Parameters of `moe_combine` and `moe_combine_wide`.
    struct MoeCombineParams {
        extent: ExtentParams = "Extent",
        x: MatrixParams = "Matrix<const X>",
        weights: MatrixParams = "Matrix<const float>",
        experts: MatrixParams = "Matrix<const int>",
        y: MatrixParams = "Matrix<X>",
        /// Columns of the result.
        columns: i64 = "i64",
        /// Experts of the device, and the index of the first.
        count: i64 = "i64",
        first_expert: i64 = "i64",
    }
}

/// The generated headers of these kernels' parameters.
pub(super) fn params_headers() -> Vec<(String, String)> {
    vec![
        params_header("experts/route", &[declaration::<MoeRouteParams>()]),
        params_header("experts/group", &[declaration::<MoeGroupParams>()]),
        params_header("experts/combine", &[declaration::<MoeCombineParams>()]),
        linear::params_header(),
    ]
}

/// The number of assignments of so many tokens; fails if kernels cannot count them.
fn assignments(rows: usize, slots: usize) -> Result<usize> {
    rows.checked_mul(slots).filter(|all| *all <= MAX_ASSIGNMENTS).ok_or_else(|| {
        let message = format!("{rows} tokens of {slots} experts are more than {MAX_ASSIGNMENTS} assignments");
        Error::unsupported(message).at("experts")
    })
}

pub(super) fn moe_route(op: &MoeRoute, call: &CallDesc) -> Result<KernelPlan> {
    let logits = operand(call, 0)?;
    let (experts, slots, groups) = (logits.shape[1], op.top_k as usize, op.groups as usize);
    if experts > MAX_EXPERTS {
        let message = format!("CUDA routes among at most {MAX_EXPERTS} experts, not {experts}");
        return Err(Error::unsupported(message).at("logits").field("shape[1]"));
    }
    let given = call.tensor(4).is_some();
    let by_logit = op.groups == 1 && call.tensor(2).is_none();
    let team = if experts <= 32 * OWN_EXPERTS { 32 } else { ROUTE_THREADS };
    let teams = ROUTE_THREADS / team;
    let own = experts.div_ceil(team).max(1);
    // Logits and keys of experts, experts and weights of slots, keys of groups.
    let words = 2 * experts + 2 * slots + groups;
    let divisor = match op.norm {
        RouterNorm::None => 0,
        RouterNorm::Sum => 1,
        RouterNorm::ClampedSum => 2,
    };
    let defines: [(_, &dyn Display); 9] = [
        ("X", &type_of(call, 0)?),
        ("TEAM", &team),
        ("TEAM_WORDS", &words),
        ("OWN", &own),
        ("SCORE", &(op.score as u32)),
        ("GIVEN", &i32::from(given)),
        ("BY_LOGIT", &i32::from(by_logit)),
        ("GROUP_SUM", &i32::from(op.group_score == GroupScore::TopTwoSum)),
        ("DIVISOR", &divisor),
    ];
    let shared = (teams * words + team / 32) * size_of::<u32>();
    let spec = KernelSpec::new("experts/route.cu", "moe_route", defines).with_shared(shared);
    let op = *op;
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (logits, experts, weights) = (frame.tensor(0)?, frame.result(0)?, frame.result(1)?);
        let ids = frame.optional(4);
        let rows = logits.size(0);
        let mut bounds = vec![logits, experts, weights];
        bounds.extend(ids);
        let params = MoeRouteParams {
            extent: ExtentParams::of(rows, &bounds),
            logits: MatrixParams::of(logits),
            bias: frame.address(1),
            selection_bias: frame.address(2),
            expert_scale: frame.address(3),
            ids: MatrixParams::optional(ids),
            experts: MatrixParams::of(experts),
            weights: MatrixParams::of(weights),
            expert_count: logits.size(1) as i64,
            slots: i64::from(op.top_k),
            groups: i64::from(op.groups),
            top_groups: i64::from(op.top_groups),
            eps: op.eps,
            scale: op.scale,
            threshold: op.threshold,
        };
        let grid = [rows.div_ceil(teams).min(MAX_GRID), 1, 1];
        Ok(LaunchOp::kernel(function, grid, team * teams, &params))
    }))
}

/// The kernel that groups the assignments of `slots` experts a token.
fn group_spec(slots: usize) -> KernelSpec {
    KernelSpec::new("experts/group.cu", "moe_group", [("SLOTS", &slots)])
}

pub(super) fn moe_group(op: &MoeGroup, call: &CallDesc) -> Result<KernelPlan> {
    let [rows, slots] = operand(call, 0)?.shape[..] else {
        return Err(Error::internal("experts are not a table"));
    };
    assignments(rows, slots)?;
    let (count, first_expert) = (op.count, op.first_expert);
    // A table without slots has no assignments, and starts that are 0.
    let (rows, spec) = if slots == 0 { (0, group_spec(1)) } else { (rows, group_spec(slots)) };
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (experts, order, starts) = (frame.tensor(0)?, frame.result(0)?, frame.result(1)?);
        let params = MoeGroupParams {
            extent: ExtentParams::of(rows, &[experts, order]),
            experts: MatrixParams::of(experts),
            order: MatrixParams::of(order),
            starts: starts.address,
            count: i64::from(count),
            first_expert: i64::from(first_expert),
        };
        Ok(LaunchOp::kernel(function, [(count as usize).min(MAX_GRID), 1, 1], GROUP_THREADS, &params))
    }))
}

pub(super) fn moe_combine(op: &MoeCombine, call: &CallDesc) -> Result<KernelPlan> {
    let (x, y) = (operand(call, 0)?, result(call, 0)?);
    let slots = operand(call, 2)?.shape[1];
    let wide = wide(&[x, y]) && y.shape[1].is_multiple_of(WIDE);
    let entry = if wide { "moe_combine_wide" } else { "moe_combine" };
    let defines: [(_, &dyn Display); 2] = [("X", &type_of(call, 0)?), ("SLOTS", &slots)];
    let spec = KernelSpec::new("experts/combine.cu", entry, defines);
    let (count, first_expert) = (op.count, op.first_expert);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (x, weights, experts) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let y = frame.result(0)?;
        let (rows, columns) = (y.size(0), y.size(1));
        let params = MoeCombineParams {
            extent: ExtentParams::of(rows, &[x, weights, experts, y]),
            x: MatrixParams::of(x),
            weights: MatrixParams::of(weights),
            experts: MatrixParams::of(experts),
            y: MatrixParams::of(y),
            columns: columns as i64,
            count: i64::from(count),
            first_expert: i64::from(first_expert),
        };
        let items = if wide { columns / WIDE } else { columns };
        Ok(LaunchOp::kernel(function, plane(rows, items), THREADS, &params))
    }))
}
