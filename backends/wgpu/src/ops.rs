//! Plans calls as dispatches: one file per op family, as in [`dsrun_core::op`].

mod activation;
mod attention;
mod cache;
mod elementwise;
mod embed;
mod experts;
pub(crate) mod launch;
mod linear;
pub(crate) mod matrices;
mod moe;
mod norm;
mod quant;
mod region;
mod rope;
mod sampling;
#[cfg(test)]
mod sources;
mod step;
pub(crate) mod weight;

use crate::driver::adapter::DeviceSpec;
use dsrun_core::{DType, Error, Result, TensorDesc, kernels::CallDesc, op::Op};
use launch::CallPlan;

/// Plans a call.
///
/// # Errors
/// [`dsrun_core::Code::Unsupported`] with the reason if the device does not run it.
pub(crate) fn plan(call: &CallDesc, spec: &DeviceSpec) -> Result<CallPlan> {
    call.refuse_i8_caches("wgpu")?;
    check(call, spec)?;
    match &call.op {
        Op::Add(op) => elementwise::add(op, call),
        Op::Cast(_) => elementwise::cast(call),
        Op::Columns(op) => elementwise::columns(op, call),
        Op::GatherRows(_) => elementwise::gather_rows(call),
        Op::RmsNorm(op) => norm::rms_norm(op, call),
        Op::LayerNorm(op) => norm::layer_norm(op, call),
        Op::Embed(op) => embed::embed(op, call, spec),
        Op::Linear(_) => linear::linear(call, spec),
        Op::QuantPerToken(_) => quant::quant_per_token(call),
        Op::LinearW8A8(_) => quant::linear_w8a8(call, spec),
        Op::MoeRoute(op) => moe::route(op, call, spec),
        Op::MoeGroup(op) => moe::group(op, call),
        Op::GroupedLinear(op) => experts::grouped_linear(op, call, spec),
        Op::MoeCombine(op) => moe::combine(op, call),
        Op::HeadLinear(op) => experts::head_linear(op, call, spec),
        Op::LatentWrite(_) => cache::latent_write(call),
        Op::Activation(op) => activation::activation(op, call),
        Op::GatedActivation(op) => activation::gated_activation(op, call),
        Op::Rope(op) => rope::rope(op, call),
        Op::KvWrite(_) => cache::kv_write(call),
        Op::PageGather(_) => cache::page_gather(call),
        Op::PageScatter(_) => cache::page_scatter(call),
        // Attention of this backend needs no work list, so the call does nothing.
        Op::AttentionPrepare(_) => Ok(CallPlan::default()),
        Op::PagedAttention(op) => attention::paged_attention(op, call, spec),
        Op::Attention(op) => attention::attention(op, call, spec),
        Op::LogitProcess(_) => sampling::logit_process(call),
        Op::Argmax(_) => sampling::argmax(call, &spec.limits),
        Op::Sample(_) => sampling::sample(call, &spec.limits),
        Op::PrepareStep(op) => step::prepare_step(op, call),
        Op::CommitTokens(_) => step::commit_tokens(call),
        Op::Region(body) => region::region(body, call, spec),
        other => Err(Error::unsupported(format!("this backend has no kernel for {} yet", other.name()))),
    }
}

/// Refuses tensors of types that the adapter has no instructions for, or longer than a binding.
fn check(call: &CallDesc, spec: &DeviceSpec) -> Result<()> {
    let one = |tensor: &TensorDesc, name: &str| -> Result<()> {
        let feature = match tensor.dtype {
            DType::F16 if !spec.f16 => Some("SHADER_F16"),
            DType::BF16 if !spec.i16 => Some("SHADER_I16"),
            _ => None,
        };
        if let Some(feature) = feature {
            let message = format!("is {}, which needs {feature}, and the adapter lacks it", tensor.dtype);
            return Err(Error::unsupported(message).at(name).field("dtype"));
        }
        let (bytes, limit) = (tensor.bytes()?, spec.binding_bytes());
        if bytes > limit {
            let message = format!("is {bytes} bytes, but the adapter binds at most {limit}");
            return Err(Error::unsupported(message).at(name).field("shape"));
        }
        Ok(())
    };
    for index in 0..call.operands.len() {
        if let Some(tensor) = call.tensor(index) {
            one(tensor, &call.operand_name(index))?;
        }
    }
    call.results.iter().enumerate().try_for_each(|(index, result)| one(result, &call.result_name(index)))
}
