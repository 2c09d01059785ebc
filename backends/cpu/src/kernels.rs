//! The kernels of a device handle: from an op to its kernel.

use crate::{
    kernel::Kernel,
    ops,
    packed::{self, PackedMatrix},
    parallel::{Scratch, Worker},
};
use dsrun_core::{
    Error, Result, WeightReader,
    kernels::{PackedLayout, WeightDesc},
    op::Op,
};
use dsrun_host::{Compute, Frame, Host, PackedMemory};
use std::sync::{Mutex, PoisonError};

/// The kernels of a device handle, with the scratch memory they share.
#[derive(Debug)]
pub(crate) struct CpuKernels {
    /// Never contended: calls of a device handle take turns.
    scratch: Mutex<Scratch>,
}

impl CpuKernels {
    pub(crate) fn new(threads: usize) -> Self {
        Self { scratch: Mutex::new(Scratch::new(threads)) }
    }
}

impl Compute for CpuKernels {
    type Weight = PackedMatrix;
    type Kernel = Box<dyn Kernel>;

    fn layout(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        packed::layout(weight)
    }

    fn pack(&self, weight: &WeightDesc, rows: &mut dyn WeightReader, host: &Host) -> Result<PackedMatrix> {
        PackedMatrix::pack(weight, rows, &host.pool)
    }

    fn image(&self, weight: &PackedMatrix, out: &mut [u8]) -> Result<()> {
        weight.image(out)
    }

    fn adopt(&self, weight: &WeightDesc, memory: PackedMemory) -> Result<PackedMatrix> {
        PackedMatrix::adopt(weight, memory)
    }

    fn kernel(&self, op: &Op) -> Result<Box<dyn Kernel>> {
        Ok(match op {
            Op::Embed(op) => Box::new(*op),
            Op::RmsNorm(op) => Box::new(*op),
            Op::LayerNorm(op) => Box::new(*op),
            Op::Linear(op) => Box::new(*op),
            Op::Activation(op) => Box::new(*op),
            Op::GatedActivation(op) => Box::new(*op),
            Op::Rope(op) => Box::new(*op),
            Op::KvWrite(op) => Box::new(*op),
            Op::AttentionPrepare(op) => Box::new(*op),
            Op::PagedAttention(op) => Box::new(*op),
            Op::Attention(op) => Box::new(*op),
            Op::Add(op) => Box::new(*op),
            Op::Cast(op) => Box::new(*op),
            Op::Columns(op) => Box::new(*op),
            Op::GatherRows(op) => Box::new(*op),
            Op::LogitProcess(op) => Box::new(*op),
            Op::Argmax(op) => Box::new(*op),
            Op::Sample(op) => Box::new(*op),
            Op::QuantPerToken(op) => Box::new(*op),
            Op::LinearW8A8(op) => Box::new(*op),
            Op::QuantPerGroup(op) => Box::new(*op),
            Op::LinearA8(op) => Box::new(*op),
            Op::MoeRoute(op) => Box::new(*op),
            Op::MoeGroup(op) => Box::new(*op),
            Op::GroupedLinear(op) => Box::new(*op),
            Op::MoeCombine(op) => Box::new(*op),
            Op::HeadLinear(op) => Box::new(*op),
            Op::LatentWrite(op) => Box::new(*op),
            Op::Region(region) => ops::region::kernel(region)?,
            other => {
                return Err(Error::unsupported(format!(
                    "the CPU backend has no kernel for {}",
                    other.name()
                )));
            }
        })
    }

    fn is_batch_invariant(&self, _: &Op) -> bool {
        true
    }

    fn run(&self, kernel: &Box<dyn Kernel>, frame: &Frame<'_>, host: &Host) -> Result<()> {
        // Scratch memory has no state that a panic could have broken.
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        kernel.run(frame, &mut Worker::new(&host.pool, &mut scratch))
    }
}
