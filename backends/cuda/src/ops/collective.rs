//! Collectives, by peer exchange or by NCCL, depending on the group and the size.
//!
//! Peer exchange transfers the rows below the extent; NCCL transfers all rows, because it takes its counts from the host.

mod by_nccl;
mod by_peers;
mod summed;

use crate::{
    arch::{DeviceSpec, crossover::by_peers},
    collective::CudaComm,
    driver::{
        context::Context,
        rendezvous::{Rendezvous, Turn},
    },
    ops::{KernelPlan, operand, result},
};
use dsrun_core::{Error, Result, TensorDesc, collective::Comm, kernels::CallDesc, op::Op};
use std::{any::Any, sync::Arc};

pub(super) use by_peers::{all_specs, params_headers};
pub(super) use summed::region;

/// The group of a collective.
pub(super) fn comm(call: &CallDesc) -> Result<Arc<CudaComm>> {
    let comm = call.comm.as_ref().ok_or_else(|| Error::invalid("is missing").at("comm"))?;
    let any: Arc<dyn Any + Send + Sync> = comm.clone();
    any.downcast().map_err(|_| Error::invalid("is a group of another backend").at("comm"))
}

/// The rendezvous of a call, if it is a collective.
///
/// # Errors
/// If the group was joined by another handle of the device.
pub(crate) fn rendezvous(call: &CallDesc, context: &Arc<Context>) -> Result<Option<Rendezvous>> {
    if call.op.mesh_axis().is_none() {
        return Ok(None);
    }
    let turn = match &call.op {
        Op::Send(op) => Turn::Send(op.peer as usize),
        Op::Receive(op) => Turn::Receive(op.peer as usize),
        _ => Turn::All,
    };
    let group = comm(call)?;
    if !Arc::ptr_eq(group.context(), context) {
        return Err(Error::invalid("was joined by another handle of the device").at("comm"));
    }
    Ok(Some(Rendezvous { group, turn }))
}

pub(super) fn plan(call: &CallDesc, device: &DeviceSpec) -> Result<KernelPlan> {
    let comm = comm(call)?;
    let planes = Planes::of(call)?;
    match (&comm.exchange, &comm.nccl) {
        (Some(_), None) => by_peers::plan(call, None, planes, &comm),
        (None, Some(nccl)) => by_nccl::plan(call, planes, nccl),
        (Some(_), Some(nccl)) => match prefers_peers(&call.op, planes, device) {
            true => by_peers::plan(call, None, planes, &comm),
            false => by_nccl::plan(call, planes, nccl),
        },
        (None, None) => Err(Error::internal("the group has no transport")),
    }
}

/// Whether peer exchange runs a collective for which there is NCCL, too: where it is faster, or always if the result must not depend on
/// the size: peers add in the order of ranks, NCCL in an order that depends on its algorithm.
fn prefers_peers(op: &Op, planes: Planes, device: &DeviceSpec) -> bool {
    device.batch_invariant || by_peers(op, planes.bytes())
}

/// The planes that ranks exchange, all of one shape: the part of the operand that goes to each rank, and the part of the result
/// that comes from each rank. A stride of 0 means the same plane for all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Planes {
    ranks: usize,
    rows: usize,
    columns: usize,
    element_bytes: usize,
    /// Elements from one rank's plane of the operand to the next rank's.
    x_part: usize,
    /// Elements from one rank's plane of the result to the next rank's.
    y_part: usize,
    /// Whether the rows of the operand, and of the result, are contiguous.
    dense: [bool; 2],
    /// Whether the number of valid rows is an extent on the device.
    bounded: bool,
    /// Whether rows of all planes consist of whole, aligned 8-byte words.
    wide: bool,
}

/// Whether the rows are contiguous.
fn is_dense(plane: &TensorDesc) -> bool {
    plane.shape[0] <= 1 || plane.strides[0] == plane.shape[1]
}

impl Planes {
    fn of(call: &CallDesc) -> Result<Self> {
        let ranks = comm(call)?.ranks();
        if matches!(call.op, Op::Barrier(_)) {
            return Ok(Self {
                ranks,
                rows: 0,
                columns: 0,
                element_bytes: 4,
                x_part: 0,
                y_part: 0,
                dense: [true; 2],
                bounded: false,
                wide: true,
            });
        }
        let x = operand(call, 0)?;
        let y = if call.results.is_empty() { x } else { result(call, 0)? };
        let by_rows = match &call.op {
            Op::AllGather(op) => op.rows,
            Op::ReduceScatter(op) => op.rows,
            Op::AllToAll(_) => true,
            _ => false,
        };
        let bounded = x.bounded || y.bounded;
        if by_rows && bounded {
            let message = "is bounded, but its rows are divided among ranks";
            return Err(Error::unsupported(message).at("x").field("extent"));
        }
        let (mut rows, columns) = match &call.op {
            Op::ReduceScatter(_) => (y.shape[0], y.shape[1]),
            _ => (x.shape[0], x.shape[1]),
        };
        if matches!(call.op, Op::AllToAll(_)) {
            rows /= ranks;
        }
        let parts = |tensor: &TensorDesc| if by_rows { rows * tensor.strides[0] } else { columns };
        let (x_part, y_part) = match &call.op {
            Op::AllGather(_) => (0, parts(y)),
            Op::ReduceScatter(_) => (parts(x), 0),
            Op::AllToAll(_) => (parts(x), parts(y)),
            _ => (0, 0),
        };
        let (element_bytes, dense) = (x.dtype.bytes(), [is_dense(x), is_dense(y)]);
        let narrow =
            Self { ranks, rows, columns, element_bytes, x_part, y_part, dense, bounded, wide: false };
        Ok(Self { wide: narrow.are_words(x) && narrow.are_words(y), ..narrow })
    }

    /// Whether rows of a tensor like these planes consist of whole, aligned 8-byte words.
    fn are_words(&self, tensor: &TensorDesc) -> bool {
        let whole = |elements: usize| (elements * self.element_bytes).is_multiple_of(by_peers::UNIT_BYTES);
        whole(self.columns) && whole(tensor.strides[0])
    }

    /// The maximum number of bytes sent from one rank to another.
    fn bytes(&self) -> usize {
        self.rows * self.columns * self.element_bytes
    }
}
