//! Recipes: how ops become kernel launches. One file per op family, as in [`dsrun_core::op`].
//!
//! A recipe is made from a description alone, without a device, so that every kernel a program needs can be named, and
//! compiled, anywhere.

mod attention;
mod band;
mod batch;
mod cache;
mod chain;
mod decode;
mod elementwise;
pub(crate) mod layers;
mod linear;
pub(crate) mod next_token;
mod norm;
mod packed;
mod quant;
pub(crate) mod quantised;
mod region;
mod sampling;
mod step;

use crate::{
    context::Context,
    launch::{Frame, Function, Step},
    spec::{KernelSpec, Machine},
};
use dsrun_core::{
    DType, Error, Result, TensorDesc,
    kernels::{CallDesc, OperandDesc},
    op::Op,
};
use std::sync::Arc;

/// Makes the launches of a bound call. The functions are those of the recipe's kernels, in order.
pub(crate) type MakeSteps =
    Box<dyn Fn(&Frame, &[Arc<Function>], &Context) -> Result<Vec<Step>> + Send + Sync>;

/// How a call is run.
pub(crate) struct Recipe {
    pub(crate) kernels: Vec<KernelSpec>,
    /// Scratch memory.
    pub(crate) workspace: usize,
    /// Zeroed memory of each bound call.
    pub(crate) persistent: usize,
    pub(crate) batch_invariant: bool,
    pub(crate) steps: MakeSteps,
}

impl Recipe {
    /// A recipe of one kernel without scratch memory.
    pub(crate) fn of_one(
        spec: KernelSpec,
        step: impl Fn(&Frame, &Arc<Function>) -> Result<Option<Step>> + Send + Sync + 'static,
    ) -> Self {
        let steps: MakeSteps = Box::new(move |frame, functions, _| {
            let function = functions.first().ok_or_else(|| Error::internal("a recipe without a kernel"))?;
            Ok(step(frame, function)?.into_iter().collect())
        });
        Self { kernels: vec![spec], workspace: 0, persistent: 0, batch_invariant: true, steps }
    }

    /// A recipe that has nothing to do.
    pub(crate) fn nothing() -> Self {
        let steps: MakeSteps = Box::new(|_, _, _| Ok(Vec::new()));
        Self { kernels: Vec::new(), workspace: 0, persistent: 0, batch_invariant: true, steps }
    }
}

/// How a valid call is run, or an error that says why it is not.
pub(crate) fn recipe(call: &CallDesc, machine: &Machine) -> Result<Recipe> {
    check_sizes(call)?;
    match &call.op {
        Op::Embed(op) => elementwise::embed(op, call),
        Op::RmsNorm(op) => norm::rms_norm(op, call, machine),
        Op::LayerNorm(op) => norm::layer_norm(op, call),
        Op::Linear(op) => linear::linear(op, call, machine),
        Op::LinearW8A8(op) => linear::linear_w8a8(op, call, machine),
        Op::QuantPerToken(_) => quant::quant_per_token(call),
        Op::Matmul(op) => linear::matmul(op, call),
        Op::Activation(op) => elementwise::activation(op, call),
        Op::GatedActivation(op) => elementwise::gated_activation(op, call),
        Op::Rope(op) => elementwise::rope(op, call),
        Op::KvWrite(_) => cache::kv_write(call),
        Op::PageCopy(_) => cache::page_copy(call),
        Op::PageGather(_) => cache::page_gather(call),
        Op::PageScatter(_) => cache::page_scatter(call),
        Op::AttentionPrepare(_) => Ok(Recipe::nothing()),
        Op::PagedAttention(op) => match decode::recipe(op, call, machine)? {
            Some(recipe) => Ok(recipe),
            None => attention::paged(op, call, machine),
        },
        Op::Attention(op) => attention::unpaged(op, call, machine),
        Op::Add(op) => elementwise::add(op, call),
        Op::Cast(op) => elementwise::cast(op, call),
        Op::Columns(op) => elementwise::columns(op, call),
        Op::Fill(op) => elementwise::fill(op, call),
        Op::GatherRows(_) => elementwise::gather_rows(call),
        Op::PrepareStep(op) => step::prepare_step(op, call),
        Op::LogitProcess(_) => sampling::logit_process(call, machine),
        Op::Argmax(_) => sampling::argmax(call, machine),
        Op::Sample(_) => sampling::sample(call),
        Op::CommitTokens(_) => step::commit_tokens(call),
        Op::Region(region) => region::recipe(region, call, machine),
        other => Err(Error::unsupported(format!("CUDA has no kernel for {} yet", other.name()))),
    }
}

/// The kernels a call needs.
///
/// # Errors
/// If the call is wrong or not native.
pub fn kernel_specs(call: &CallDesc, machine: &Machine) -> Result<Vec<KernelSpec>> {
    call.validate()?;
    Ok(recipe(call, machine)?.kernels)
}

/// The kernel that brings a few words between host and device.
pub fn copy_kernel() -> KernelSpec {
    KernelSpec::new("copy/copy.cu", "copy", [])
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
                crate::weight::layout(weight).map_err(|error| error.at(&call.operand_name(index)))?;
            }
            None => {}
        }
    }
    call.results.iter().enumerate().try_for_each(|(index, result)| check(result, &call.result_name(index)))
}

/// The name of an element type in the kernels.
fn type_name(dtype: DType) -> Result<&'static str> {
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
    [columns.div_ceil(THREADS).min(1 << 20), rows.min(crate::launch::MAX_GRID), 1]
}
