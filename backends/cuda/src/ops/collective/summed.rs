//! A call whose results are summed over ranks and added to a residual: the launches of the call, and one for the sum.

use super::{Planes, by_peers, comm, prefers_peers};
use crate::{
    arch::DeviceSpec,
    ops::{KernelPlan, bound::Bound, frame::Source, operand, result},
};
use dsrun_core::{
    Error, Result, TensorDesc,
    kernels::{CallDesc, OperandDesc},
    op::{Add, AllReduce, Op, Reduction},
    program::{Call, ValueId},
    region::Region,
};

/// Bytes to which rows of the call's results are aligned.
const ALIGNMENT: usize = 16;

/// The plan of a region of some call, the all-reduce of its result, and a residual sum; `None` if the region is something else. `plan`
/// plans the first call.
///
/// Ranks that launch these one by one exchange the same messages, so they need not agree.
pub(in crate::ops) fn region(
    region: &Region,
    call: &CallDesc,
    device: &DeviceSpec,
    plan: &dyn Fn(&CallDesc) -> Result<KernelPlan>,
) -> Result<Option<KernelPlan>> {
    let Some(Body { first, reduce, add, residual }) = Body::of(region) else { return Ok(None) };
    let y = result(call, 0)?;
    let x = rows_like(y);
    let x_bytes = x.bytes()?.next_multiple_of(256);
    let given = |index: &Option<ValueId>| call.operands.get((*index)?.index())?.clone();
    let summand = CallDesc {
        op: first.op.clone(),
        operands: first.operands.iter().map(given).collect(),
        results: vec![x.clone()],
        comm: None,
    };
    let sum = CallDesc {
        op: Op::from(reduce),
        operands: vec![Some(OperandDesc::Tensor(x.clone()))],
        results: vec![y.clone()],
        comm: call.comm.clone(),
    };
    let (comm, planes) = (comm(&sum)?, Planes::of(&sum)?);
    if comm.exchange.is_none() || !prefers_peers(&sum.op, planes, device) {
        return Err(Error::unsupported("NCCL adds no sums to a residual"));
    }
    if comm.in_step() {
        return Err(Error::unsupported(
            "ranks share a GPU, where the first call must not be enqueued with the sum",
        ));
    }
    let wide = planes.wide && planes.are_words(operand(call, residual)?);
    let sum = by_peers::plan(&sum, Some(add.alpha), Planes { wide, ..planes }, &comm)?;
    let summand = plan(&summand)?;
    let operands: Vec<_> = first.operands.iter().map(|id| id.map(|id| id.index())).collect();
    let own = summand.kernels.len();
    Ok(Some(KernelPlan {
        kernels: [summand.kernels, sum.kernels].concat(),
        workspace: x_bytes + summand.workspace,
        persistent: summand.persistent,
        batch_invariant: summand.batch_invariant && sum.batch_invariant,
        launches: Box::new(move |frame, functions, context| {
            let y = frame.result(0)?;
            let x = Bound { desc: x.clone(), address: frame.workspace, extent: y.extent };
            let given: Vec<_> = operands.iter().map(|index| index.map(Source::Operand)).collect();
            let mut inside = frame.within(&given, vec![x.clone()]);
            (inside.workspace, inside.persistent) = (frame.workspace + x_bytes as u64, frame.persistent);
            let mut launches = (summand.launches)(&inside, &functions[..own], context)?;
            let given = [Some(Source::Scratch(&x)), Some(Source::Operand(residual))];
            let outside = frame.within(&given, vec![y.clone()]);
            launches.extend((sum.launches)(&outside, &functions[own..], context)?);
            Ok(launches)
        }),
    }))
}

/// The calls of such a region, and the number of the operand that is the residual.
struct Body<'a> {
    first: &'a Call,
    reduce: AllReduce,
    add: Add,
    residual: usize,
}

impl<'a> Body<'a> {
    fn of(region: &'a Region) -> Option<Self> {
        let [first, reducing, adding] = region.calls() else { return None };
        let (Op::AllReduce(reduce), Op::Add(add)) = (&reducing.op, &adding.op) else { return None };
        let ([x], [reduced]) = (first.results.as_slice(), reducing.results.as_slice()) else { return None };
        let [Some(residual), Some(sum), None, None] = adding.operands[..] else { return None };
        let whole = reduce.reduction == Reduction::Sum
            && first.op.mesh_axis().is_none()
            && first.op.updates(0).is_none()
            && reducing.operands == [Some(*x)]
            && sum == *reduced
            && residual.index() < region.operands()
            && region.results() == adding.results;
        whole.then(|| Self { first, reduce: *reduce, add: *add, residual: residual.index() })
    }
}

/// As many rows as another tensor has, aligned for loads of vectors.
fn rows_like(other: &TensorDesc) -> TensorDesc {
    let bytes = other.dtype.bytes();
    let mut rows = TensorDesc::dense(other.dtype, &other.shape);
    rows.strides[0] = (other.shape[1] * bytes).next_multiple_of(ALIGNMENT) / bytes;
    rows.bounded = other.bounded;
    rows
}
