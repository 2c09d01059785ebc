//! From an op to its function.

use crate::{failure::Failure, weight::Weight};
use dsrun_core::{
    Error, Result, WeightReader,
    kernels::{PackedLayout, WeightDesc},
    op::Op,
};
use dsrun_host::{Compute, Frame, Host};
use std::fmt::Debug;

/// An op the reference runs: `impl Kernel for RmsNorm` is the formula of [`dsrun_core::op::RmsNorm`].
pub(crate) trait Kernel: Debug + Send + Sync {
    /// Runs the op once.
    fn run(&self, frame: &Frame<'_>) -> std::result::Result<(), Failure>;
}

/// The kernels of a device handle.
#[derive(Debug)]
pub(crate) struct CandleKernels;

impl Compute for CandleKernels {
    type Weight = Weight;
    type Kernel = Box<dyn Kernel>;

    fn layout(&self, weight: &WeightDesc) -> Result<PackedLayout> {
        Weight::layout(&weight.weight_type)
    }

    fn pack(&self, weight: &WeightDesc, rows: &mut dyn WeightReader, _: &Host) -> Result<Weight> {
        Weight::decode(&weight.weight_type, rows)
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
            // The engine runs a region's body op by op instead, which is what the region means.
            Op::Region(region) => {
                let name = region.name();
                return Err(Error::unsupported(format!("the reference does not fuse, so not {name} either")));
            }
            other => {
                return Err(Error::unsupported(format!("the reference has no kernel for {}", other.name())));
            }
        })
    }

    fn is_batch_invariant(&self, op: &Op) -> bool {
        // The order of a matrix product's sums may depend on the number of rows.
        !matches!(op, Op::Linear(_) | Op::LinearA8(_) | Op::GroupedLinear(_) | Op::HeadLinear(_))
    }

    fn run(&self, kernel: &Self::Kernel, frame: &Frame<'_>, host: &Host) -> Result<()> {
        // Products of candle run on the threads of the pool that calls them.
        host.pool.install(|| kernel.run(frame)).map_err(Error::from)
    }
}
