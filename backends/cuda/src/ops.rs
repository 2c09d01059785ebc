//! Plans calls as kernel launches: one file or folder per op family, as in [`dsrun_core::op`].
//!
//! A plan is made from a description only, without a device, so the kernels of a program can be listed and compiled
//! on any machine.

mod attention;
mod body;
mod bound;
mod cache;
mod collective;
mod decoder;
mod elementwise;
mod experts;
pub(crate) mod frame;
mod gemm;
mod grid;
mod kernel_plan;
mod norm;
mod operands;
mod params;
mod quantise;
mod region;
mod sampling;
mod step;
pub(crate) mod weight;

use crate::{arch::DeviceSpec, driver::kernel_spec::KernelSpec};
use dsrun_core::{
    Error, Result, TensorDesc,
    checked::ValidCall,
    kernels::{CallDesc, OperandDesc},
    op::Op,
};

pub(crate) use collective::rendezvous;
pub use gemm::gemm_table;
use grid::{THREADS, WIDE, evenly, plane, wide};
pub(crate) use kernel_plan::KernelPlan;
use kernel_plan::only;
use operands::{operand, result, type_name, type_of, type_or_first, weight_type};

/// The plan of a valid call, or an error that says why there is none.
pub(crate) fn plan(call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    call.refuse_i8_caches("CUDA")?;
    check_sizes(call)?;
    match &call.op {
        Op::Embed(op) => elementwise::embed(op, call),
        Op::RmsNorm(op) => norm::rms_norm(op, call, device),
        Op::LayerNorm(op) => norm::layer_norm(op, call, device),
        Op::Linear(op) => gemm::linear(op, call, device),
        Op::LinearW8A8(op) => gemm::linear_w8a8(op, call, device),
        Op::QuantPerToken(_) => quantise::quant_per_token(call),
        Op::Activation(op) => elementwise::activation(op, call),
        Op::GatedActivation(op) => elementwise::gated_activation(op, call),
        Op::Rope(op) => elementwise::rope(op, call, device),
        Op::KvWrite(_) => cache::kv_write(call),
        Op::LatentWrite(_) => cache::latent_write(call),
        Op::PageGather(_) => cache::page_gather(call),
        Op::PageScatter(_) => cache::page_scatter(call),
        Op::AttentionPrepare(_) => Ok(KernelPlan::nothing()),
        Op::PagedAttention(op) => attention::paged(op, call, device),
        Op::Attention(op) => attention::unpaged(op, call, device),
        Op::Add(op) => elementwise::add(op, call),
        Op::Cast(op) => elementwise::cast(op, call),
        Op::Columns(op) => elementwise::columns(op, call),
        Op::GatherRows(_) => elementwise::gather_rows(call),
        Op::PrepareStep(op) => step::prepare_step(op, call),
        Op::LogitProcess(_) => sampling::logit_process(call, device),
        Op::Argmax(_) => sampling::argmax(call, device),
        Op::Sample(_) => sampling::sample(call),
        Op::CommitTokens(_) => step::commit_tokens(call),
        Op::MoeRoute(op) => experts::moe_route(op, call),
        Op::MoeGroup(op) => experts::moe_group(op, call),
        Op::GroupedLinear(op) => experts::grouped_linear(op, call, device),
        Op::MoeCombine(op) => experts::moe_combine(op, call),
        Op::HeadLinear(op) => experts::head_linear(op, call, device),
        Op::AllReduce(_)
        | Op::AllGather(_)
        | Op::ReduceScatter(_)
        | Op::AllToAll(_)
        | Op::Broadcast(_)
        | Op::Send(_)
        | Op::Receive(_)
        | Op::Barrier(_) => collective::plan(call, device),
        Op::Region(region) => region::plan(region, call, device, &|inner| plan(inner, device)),
        other => Err(Error::unsupported(format!("CUDA has no kernel for {} yet", other.name()))),
    }
}

/// The kernels a call needs.
///
/// # Errors
/// If the call is not native.
pub fn kernel_specs(call: &ValidCall, device: &DeviceSpec) -> Result<Vec<KernelSpec>> {
    Ok(plan(call, device)?.kernels)
}

/// The kernels of peer exchange for every type. They are listed separately, because a call needs a group, and thus a GPU, to name
/// them.
///
/// # Errors
/// If a type has no kernel.
pub fn exchange_kernel_specs() -> Result<Vec<KernelSpec>> {
    collective::all_specs()
}

/// The kernels of decoder layers whose results are summed over the ranks of the call's group, whatever its backend: a group of this
/// backend needs several GPUs.
///
/// # Errors
/// If the call is something else, or the kernel does not support its sizes or types.
pub fn summed_decoder_kernel_specs(call: &ValidCall, device: &DeviceSpec) -> Result<Vec<KernelSpec>> {
    decoder::summed_specs(call, device)
}

/// Headers of kernels that are generated from the structs of this crate: the name below `kernels/`, and the text.
pub fn generated_headers() -> Vec<(String, String)> {
    let shared = ("params.cuh".to_owned(), params::params_header());
    let decoder = ("decoder/params.cuh".to_owned(), decoder::params_header());
    [
        vec![
            shared,
            decoder,
            gemm::params_header(),
            norm::params_header(),
            quantise::params_header(),
            cache::params_header(),
        ],
        elementwise::params_headers(),
        attention::params_headers(),
        step::params_headers(),
        experts::params_headers(),
        sampling::params_headers(),
        collective::params_headers(),
    ]
    .concat()
}

/// Kernels use signed 32-bit indices per dimension and 64-bit offsets; grids have at most 2^31 blocks.
fn check_sizes(call: &CallDesc) -> Result<()> {
    let check =
        |tensor: &TensorDesc, name: &str| match tensor.shape.iter().find(|size| **size > i32::MAX as usize) {
            Some(size) => {
                Err(Error::unsupported(format!("a dimension of {size} is too long for CUDA")).at(name))
            }
            None => Ok(()),
        };
    for (index, operand) in call.operands.iter().enumerate() {
        match operand {
            Some(OperandDesc::Tensor(tensor)) => check(tensor, &call.operand_name(index))?,
            Some(OperandDesc::Weight(weight)) => {
                weight::layout(weight).map_err(|error| error.at(&call.operand_name(index)))?;
            }
            None => {}
        }
    }
    call.results.iter().enumerate().try_for_each(|(index, result)| check(result, &call.result_name(index)))
}
