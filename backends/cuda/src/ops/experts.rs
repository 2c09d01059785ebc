//! Mixture of experts: the router, the grouping of assignments, the linear layers of experts and the weighted sum.

mod division;
mod heads;
mod linear;
mod mixture;
mod params;
mod router;

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
    op::{MoeCombine, MoeGroup},
};
use std::fmt::Display;

pub(super) use heads::head_linear;
pub(super) use linear::grouped_linear;
pub(super) use mixture::{ExpertLinear, Mixture, region};
pub(super) use router::{RouteRule, RouterKernel, RouterVectors, moe_route};

/// Threads of a block of `moe_group`.
const GROUP_THREADS: usize = 256;
/// The maximum number of assignments of a step.
const MAX_ASSIGNMENTS: usize = 1 << 30;

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
        params_header("experts/group", &[declaration::<MoeGroupParams>()]),
        params_header("experts/combine", &[declaration::<MoeCombineParams>()]),
        params::params_header(),
    ]
    .into_iter()
    .chain(router::params_headers())
    .collect()
}

/// The number of assignments of so many tokens; fails if kernels cannot count them.
fn assignments(rows: usize, slots: usize) -> Result<usize> {
    rows.checked_mul(slots).filter(|all| *all <= MAX_ASSIGNMENTS).ok_or_else(|| {
        let message = format!("{rows} tokens of {slots} experts are more than {MAX_ASSIGNMENTS} assignments");
        Error::unsupported(message).at("experts")
    })
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
