//! Collectives by NCCL, which requires dense memory: strided planes, and planes with an extent, are copied through scratch
//! memory.

use super::Planes;
use crate::{
    driver::{
        launch::{Function, LaunchOp},
        memory::ALIGNMENT,
        nccl::{NcclCall, NcclComm, Operation},
    },
    ops::{
        KernelPlan,
        bound::Bound,
        elementwise::{copy_of_plane, copy_plane},
        frame::Frame,
        params::{ExtentParams, MatrixParams},
    },
};
use dsrun_core::{DType, Error, Result, kernels::CallDesc, op::Op};
use std::sync::Arc;

/// The input and output planes in dense scratch memory.
#[derive(Clone, Copy, Debug)]
struct Transfer {
    planes: Planes,
    /// The numbers of input and output planes.
    count: [usize; 2],
    /// Whether operand and result can be used directly.
    direct: bool,
}

impl Transfer {
    fn new(op: &Op, planes: Planes) -> Self {
        let ranks = planes.ranks;
        let count = match op {
            Op::AllGather(_) => [1, ranks],
            Op::ReduceScatter(_) => [ranks, 1],
            Op::AllToAll(_) => [ranks, ranks],
            Op::Send(_) => [1, 0],
            Op::Receive(_) => [0, 1],
            _ => [1, 1],
        };
        // Planes that are column ranges of wider rows are not dense.
        let beside = match op {
            Op::AllGather(op) => !op.rows,
            Op::ReduceScatter(op) => !op.rows,
            _ => false,
        };
        let direct = planes.dense == [true; 2] && !planes.bounded && (!beside || ranks == 1);
        Self { planes, count, direct }
    }

    /// The offset of the output in scratch memory, after the input.
    fn out(&self) -> usize {
        (self.planes.bytes() * self.count[0]).next_multiple_of(ALIGNMENT)
    }

    /// Bytes of scratch memory.
    fn workspace(&self) -> usize {
        if self.direct { 0 } else { self.out() + self.planes.bytes() * self.count[1] }
    }

    /// Copies between planes of a tensor and dense memory.
    fn copies(
        &self,
        function: &Arc<Function>,
        tensor: &Bound,
        part: usize,
        count: usize,
        dense: u64,
        into: bool,
    ) -> Vec<LaunchOp> {
        let Planes { rows, columns, element_bytes, .. } = self.planes;
        let copy = |index: usize| {
            let own = MatrixParams::of(tensor);
            let own = MatrixParams { first: own.first + (index * part * element_bytes) as u64, ..own };
            let first = dense + (index * self.planes.bytes()) as u64;
            let packed = MatrixParams { first, stride: columns as i64 };
            let planes = if into { [own, packed] } else { [packed, own] };
            copy_plane(function, ExtentParams::of(rows, &[tensor]), planes, columns)
        };
        (0..count).filter_map(copy).collect()
    }
}

pub(super) fn plan(call: &CallDesc, planes: Planes, comm: &Arc<NcclComm>) -> Result<KernelPlan> {
    let ranks = planes.ranks;
    let operation = match &call.op {
        Op::AllReduce(op) => Operation::AllReduce(op.reduction),
        Op::AllGather(_) => Operation::AllGather,
        Op::ReduceScatter(op) => Operation::ReduceScatter(op.reduction),
        Op::AllToAll(_) => Operation::AllToAll(ranks),
        Op::Broadcast(op) => Operation::Broadcast(op.root as usize),
        Op::Send(op) => Operation::Send(op.peer as usize),
        Op::Receive(op) => Operation::Receive(op.peer as usize),
        Op::Barrier(_) => return Ok(barrier(comm)),
        other => return Err(Error::internal(format!("{} is no collective", other.name()))),
    };
    let transfer = Transfer::new(&call.op, planes);
    let dtype = call.tensor(0).map_or(DType::U8, |x| x.dtype);
    let kernels = if transfer.direct { Vec::new() } else { vec![copy_of_plane(dtype.bytes())?] };
    let (comm, count) = (comm.clone(), planes.rows * planes.columns);
    // The order of a sum of more than two numbers depends on the algorithm, which depends on the size.
    let batch_invariant =
        ranks <= 2 || !matches!(operation, Operation::AllReduce(_) | Operation::ReduceScatter(_));
    let launches = move |frame: &Frame, functions: &[Arc<Function>]| -> Result<Vec<LaunchOp>> {
        let x = frame.tensor(0)?;
        let y = frame.results.first().unwrap_or(x);
        let run =
            |from, to| LaunchOp::Nccl(NcclCall { comm: comm.clone(), operation, from, to, count, dtype });
        if count == 0 {
            return Ok(Vec::new());
        }
        let Some(function) = functions.first() else { return Ok(vec![run(x.address, y.address)]) };
        let (from, to) = (frame.workspace, frame.workspace + transfer.out() as u64);
        let [going_in, coming_out] = transfer.count;
        let mut launches = transfer.copies(function, x, planes.x_part, going_in, from, true);
        launches.push(run(from, to));
        launches.extend(transfer.copies(function, y, planes.y_part, coming_out, to, false));
        Ok(launches)
    };
    let launches = move |frame: &Frame, functions: &[Arc<Function>], _: &_| launches(frame, functions);
    let plan = KernelPlan::of(kernels, Box::new(launches));
    Ok(KernelPlan { workspace: transfer.workspace(), batch_invariant, ..plan })
}

/// A barrier, as an all-reduce of one number.
fn barrier(comm: &Arc<NcclComm>) -> KernelPlan {
    let comm = comm.clone();
    let launches = move |frame: &Frame, _: &[Arc<Function>], _: &_| {
        let operation = Operation::AllReduce(dsrun_core::op::Reduction::Sum);
        let place = frame.persistent;
        let call =
            NcclCall { comm: comm.clone(), operation, from: place, to: place, count: 1, dtype: DType::U32 };
        Ok(vec![LaunchOp::Nccl(call)])
    };
    let plan = KernelPlan::of(Vec::new(), Box::new(launches));
    KernelPlan { persistent: size_of::<u32>(), ..plan }
}
