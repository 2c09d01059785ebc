//! The exchange of a launch with those of other ranks: `kernels/decoder/ranks.cuh`.

use super::{body::Body, params, refused};
use crate::{
    collective::{CudaComm, Exchange, MAX_RANKS, NO_PART, PART_BYTES, PATIENCE, RESULT_SETS, nanoseconds},
    driver::context::Context,
    ops::collective,
};
use dsrun_core::{Error, Result, collective::Comm, kernels::CallDesc};
use std::sync::Arc;

/// The ranks over which layers sum the results of attention and MLP.
#[derive(Clone, Debug)]
pub(super) struct Ranks {
    comm: Arc<CudaComm>,
}

impl Ranks {
    /// Those of a call; `None` if its layers sum nothing over ranks.
    ///
    /// # Errors
    /// If the ranks cannot exchange parts within a launch, or would not all do so.
    pub(super) fn of(body: &Body, call: &CallDesc) -> Result<Option<Self>> {
        if !body.first().summed {
            return Ok(None);
        }
        let comm = collective::comm(call)?;
        let even = comm.exchange.as_ref().is_some_and(Exchange::is_even);
        if !even || comm.only.is_some() {
            return Err(refused(
                "they sum results over ranks, which must be on GPUs of one kind that reach each other's memory",
            ));
        }
        Ok(Some(Self { comm }))
    }

    /// The parameters of the exchange.
    ///
    /// # Errors
    /// If the group has no peer exchange.
    pub(super) fn params(&self) -> Result<params::Ranks> {
        let missing = || Error::internal("the group has no peer exchange");
        let exchange = self.comm.exchange.as_ref().ok_or_else(missing)?;
        let (to, from, launched) = exchange.parts();
        let (state, failed) = (exchange.state(), exchange.failed());
        Ok(params::Ranks { to, from, launched, state, failed, patience: nanoseconds(PATIENCE) })
    }

    /// The number of ranks.
    pub(super) fn count(&self) -> usize {
        self.comm.ranks()
    }
}

/// Memory in which a rank can play all ranks, to measure a launch without the others.
pub(super) const fn bytes_alone(ranks: usize) -> usize {
    if ranks > 1 { ranks * RESULT_SETS * PART_BYTES + 256 } else { 0 }
}

/// The parameters of a launch that exchanges parts only with itself, in [`bytes_alone`] bytes of memory.
///
/// # Errors
/// If the device failed.
pub(super) fn alone(
    real: params::Ranks,
    ranks: usize,
    memory: u64,
    context: &Context,
) -> Result<params::Ranks> {
    if ranks == 1 {
        return Ok(real);
    }
    let launched = memory + (ranks * RESULT_SETS * PART_BYTES) as u64;
    context.fill(memory, ranks * RESULT_SETS * PART_BYTES, NO_PART)?;
    context.fill(launched, 256, 0)?;
    let mut to = [0; MAX_RANKS];
    for (rank, to) in to.iter_mut().enumerate().take(ranks) {
        *to = memory + (rank * PART_BYTES) as u64;
    }
    Ok(params::Ranks { to, from: memory, launched, ..real })
}
