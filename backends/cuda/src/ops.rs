//! From a call to its launches: one file or folder per op family, as in [`dsrun_core::op`].
//!
//! A plan is made from a description alone, without a device, so that every kernel a program needs can be named, and
//! compiled, anywhere.

mod attention;
mod body;
mod cache;
mod decoder;
mod elementwise;
pub(crate) mod frame;
mod gemm;
mod norm;
mod params;
mod quantise;
mod region;
mod sampling;
mod step;
pub(crate) mod weight;

use crate::{
    arch::DeviceSpec,
    driver::{
        context::Context,
        kernel_spec::KernelSpec,
        launch::{Function, LaunchOp},
    },
    ops::frame::Frame,
};
use dsrun_core::{
    DType, Error, Result, TensorDesc, WeightType,
    kernels::{CallDesc, OperandDesc},
    op::Op,
};
use std::sync::Arc;

pub use gemm::gemm_table;

/// Makes the launches of a bound call. The functions are those of the plan's kernels, in order.
pub(crate) type MakeLaunches =
    Box<dyn Fn(&Frame, &[Arc<Function>], &Context) -> Result<Vec<LaunchOp>> + Send + Sync>;

/// How a call is run.
pub(crate) struct KernelPlan {
    pub(crate) kernels: Vec<KernelSpec>,
    /// Bytes of scratch memory, which calls of a stream may share.
    pub(crate) workspace: usize,
    /// Bytes of zeroed memory of each bound call.
    pub(crate) persistent: usize,
    pub(crate) batch_invariant: bool,
    pub(crate) launches: MakeLaunches,
}

impl KernelPlan {
    /// A plan of one kernel without scratch memory.
    pub(crate) fn of_one(
        spec: KernelSpec,
        launch: impl Fn(&Frame, &Arc<Function>) -> Result<Option<LaunchOp>> + Send + Sync + 'static,
    ) -> Self {
        let launches: MakeLaunches =
            Box::new(move |frame, functions, _| Ok(launch(frame, only(functions)?)?.into_iter().collect()));
        Self { kernels: vec![spec], workspace: 0, persistent: 0, batch_invariant: true, launches }
    }

    /// A plan without launches.
    pub(crate) fn nothing() -> Self {
        let launches: MakeLaunches = Box::new(|_, _, _| Ok(Vec::new()));
        Self { kernels: Vec::new(), workspace: 0, persistent: 0, batch_invariant: true, launches }
    }
}

/// The function of a plan of one kernel.
fn only(functions: &[Arc<Function>]) -> Result<&Arc<Function>> {
    functions.first().ok_or_else(|| Error::internal("a kernel plan without a kernel"))
}

/// How a valid call is run, or an error that says why it is not.
pub(crate) fn plan(call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    check_sizes(call)?;
    match &call.op {
        Op::Embed(op) => elementwise::embed(op, call),
        Op::RmsNorm(op) => norm::rms_norm(op, call, device),
        Op::LayerNorm(op) => norm::layer_norm(op, call),
        Op::Linear(op) => gemm::linear(op, call, device),
        Op::LinearW8A8(op) => gemm::linear_w8a8(op, call, device),
        Op::QuantPerToken(_) => quantise::quant_per_token(call),
        Op::Matmul(op) => gemm::matmul(op, call),
        Op::Activation(op) => elementwise::activation(op, call),
        Op::GatedActivation(op) => elementwise::gated_activation(op, call),
        Op::Rope(op) => elementwise::rope(op, call),
        Op::KvWrite(_) => cache::kv_write(call),
        Op::PageCopy(_) => cache::page_copy(call),
        Op::PageGather(_) => cache::page_gather(call),
        Op::PageScatter(_) => cache::page_scatter(call),
        Op::AttentionPrepare(_) => Ok(KernelPlan::nothing()),
        Op::PagedAttention(op) => attention::paged(op, call, device),
        Op::Attention(op) => attention::unpaged(op, call, device),
        Op::Add(op) => elementwise::add(op, call),
        Op::Cast(op) => elementwise::cast(op, call),
        Op::Columns(op) => elementwise::columns(op, call),
        Op::Fill(op) => elementwise::fill(op, call),
        Op::GatherRows(_) => elementwise::gather_rows(call),
        Op::PrepareStep(op) => step::prepare_step(op, call),
        Op::LogitProcess(_) => sampling::logit_process(call, device),
        Op::Argmax(_) => sampling::argmax(call, device),
        Op::Sample(_) => sampling::sample(call),
        Op::CommitTokens(_) => step::commit_tokens(call),
        Op::Region(region) => region::plan(region, call, device),
        other => Err(Error::unsupported(format!("CUDA has no kernel for {} yet", other.name()))),
    }
}

/// The kernels a call needs.
///
/// # Errors
/// If the call is wrong or not native.
pub fn kernel_specs(call: &CallDesc, device: &DeviceSpec) -> Result<Vec<KernelSpec>> {
    call.validate()?;
    Ok(plan(call, device)?.kernels)
}

/// Headers of kernels that are generated from the structs of this crate: the name below `kernels/`, and the text.
pub fn generated_headers() -> [(&'static str, String); 2] {
    [("strides.cuh", params::strides_header()), ("decoder/params.cuh", decoder::params_header())]
}

/// Kernels count in signed 32 bits per dimension and 64 bits in all; grids have at most 2^31 blocks.
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

/// The name of an element type in the kernels.
pub(crate) fn type_name(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F16 => Ok("f16"),
        DType::BF16 => Ok("bf16"),
        other => Err(Error::internal(format!("{other} is no float type"))),
    }
}

/// The tensor operand at `index`.
fn operand(call: &CallDesc, index: usize) -> Result<&TensorDesc> {
    call.tensor(index).ok_or_else(|| Error::internal(format!("operand {index} is no tensor")))
}

/// The type of the packed weight at `index`.
fn weight_type(call: &CallDesc, index: usize) -> Result<&WeightType> {
    match call.operands.get(index) {
        Some(Some(OperandDesc::Weight(weight))) => Ok(weight),
        _ => Err(Error::internal(format!("operand {index} is no weight"))),
    }
}

/// The result at `index`.
fn result(call: &CallDesc, index: usize) -> Result<&TensorDesc> {
    call.results.get(index).ok_or_else(|| Error::internal(format!("there is no result {index}")))
}

/// The type name of the tensor operand at `index`.
fn type_of(call: &CallDesc, index: usize) -> Result<&'static str> {
    type_name(operand(call, index)?.dtype)
}

/// As [`type_of`], for an operand that may be left out: then any type will do.
fn type_or_f32(call: &CallDesc, index: usize) -> Result<&'static str> {
    call.tensor(index).map_or(Ok("f32"), |tensor| type_name(tensor.dtype))
}

/// Threads of a block of kernels over planes.
pub(crate) const THREADS: usize = 256;

/// Elements that a thread of a wide kernel takes at a time.
const WIDE: usize = 8;
/// Rows from where on wide kernels pay: with fewer there are not enough threads to fill the device.
const WIDE_ROWS: usize = 16;

/// Blocks that take rows in turns, where so many find room at once: as few as do it in as many turns.
fn evenly(rows: usize, at_once: usize) -> usize {
    let turns = rows.div_ceil(at_once.max(1)).max(1);
    rows.div_ceil(turns)
}

/// Whether planes of these descriptions have many rows, which can be taken [`WIDE`] elements at a time.
fn wide(planes: &[&TensorDesc]) -> bool {
    planes.iter().all(|plane| {
        let [rows, columns] = plane.shape[..] else { return false };
        let aligned = columns.is_multiple_of(WIDE) && plane.strides[0].is_multiple_of(WIDE);
        aligned && rows >= WIDE_ROWS
    })
}

/// The grid of kernels over planes: chunks of columns, rows.
fn plane(rows: usize, columns: usize) -> [usize; 3] {
    [columns.div_ceil(THREADS).min(1 << 20), rows.min(crate::driver::launch::MAX_GRID), 1]
}
