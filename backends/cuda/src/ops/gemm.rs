//! GEMM: dense and quantised linear layers, alone or fused with a preceding norm and an epilogue.
//!
//! A call or a region is read as a [`FusedLinear`]. [`plan`](plan::plan) describes it as a [`Problem`](problem::Problem), for
//! which [`select`](select::select) returns a kernel family that computes all of it in one launch. If there is none, norm and
//! epilogue become separate launches.

mod apply_epilogue;
mod epilogue;
mod families;
mod family;
pub(super) mod fused_linear;
mod plan;
mod problem;
mod select;

use crate::{arch::DeviceSpec, ops::KernelPlan};
use dsrun_core::{
    Result,
    kernels::CallDesc,
    op::{Linear, LinearW8A8},
};

pub(super) use epilogue::params_header;
pub(super) use fused_linear::FusedLinear;
pub(super) use plan::plan as fused;
pub use select::gemm_table;

pub(super) fn linear(op: &Linear, call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    fused(FusedLinear::of_linear(call, op.dtype), call, device)
}

pub(super) fn linear_w8a8(op: &LinearW8A8, call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    fused(FusedLinear::of_linear_w8a8(call, op.dtype), call, device)
}
