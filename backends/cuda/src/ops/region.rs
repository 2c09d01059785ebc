//! Fused kernels for regions. A region is recognised by its body, not by its name: if a kernel supports the body it is
//! native, otherwise core lowers the region.
//!
//! | body | runs as |
//! |---|---|
//! | sum, RMS norm | [`super::norm`] |
//! | norm or activation, quantisation | [`super::quantise`] |
//! | optional norm, linear, then a sum, an activation, or heads | [`super::gemm`] |
//! | attention, quantisation | [`super::attention`] |
//! | experts of a layer, from the router's logits to the weighted sum | [`super::experts`] |
//! | layers of a decoder for one token, optionally with the embedding | [`super::decoder`] |
//! | logits of one row to its token | [`super::sampling`] |
//! | any call, its sum over ranks, a residual sum | [`super::collective`] |

use crate::{
    arch::DeviceSpec,
    ops::{KernelPlan, attention, collective, decoder, experts, gemm, norm, quantise, sampling},
};
use dsrun_core::{
    Error, Result,
    kernels::CallDesc,
    op::Op,
    region::{Region, well_known},
};

/// The plan of a region; `plan` plans calls of its body that have kernels of their own.
pub(super) fn plan(
    region: &Region,
    call: &CallDesc,
    device: &DeviceSpec,
    plan: &dyn Fn(&CallDesc) -> Result<KernelPlan>,
) -> Result<KernelPlan> {
    if let [first, second] = region.calls()
        && let (Op::Add(add), Op::RmsNorm(norm)) = (&first.op, &second.op)
        && *region == well_known::add_rms_norm(*add, *norm)?
    {
        return norm::add_rms_norm(add, norm, call);
    }
    if let Some(plan) = quantise::region(region, call)? {
        return Ok(plan);
    }
    if let Some(fused) = gemm::FusedLinear::of_region(region) {
        return gemm::fused(fused, call, device);
    }
    if let Some(plan) = attention::region(region, call, device)? {
        return Ok(plan);
    }
    if let Some(plan) = sampling::region(region, call)? {
        return Ok(plan);
    }
    if let Some(plan) = experts::region(region, call, device)? {
        return Ok(plan);
    }
    if let Some(plan) = collective::region(region, call, device, plan)? {
        return Ok(plan);
    }
    if let Some(plan) = decoder::plan(region, call, device)? {
        return Ok(plan);
    }
    let mut ops: Vec<&str> = region.calls().iter().map(|call| call.op.name()).collect();
    ops.dedup();
    Err(Error::unsupported(format!("CUDA has no fused kernel for a body of {}", ops.join(", "))))
}
