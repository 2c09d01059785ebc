//! Attention of single tokens with quantised results; the block that finishes a row last quantises it:
//! `attention/decode.cu` with `QUANTISED`.
//!
//! The region is `paged_attention` and the `quant_per_token` of its result; the unquantised rows are scratch memory.

use super::{decode::Decode, params::QuantisedRows};
use crate::{
    arch::DeviceSpec,
    ops::{
        KernelPlan,
        body::{BodyReader, made, value},
        bound::Bound,
        only, operand,
        params::MatrixParams,
    },
};
use dsrun_core::{
    Result, TensorDesc,
    kernels::CallDesc,
    op::{Op, PagedAttention},
    region::Region,
};

/// The maximum row length: a thread keeps 64 elements.
const MOST_COLUMNS: usize = 8192;
/// Elements per load and store.
const VECTOR: usize = 8;
/// The number of required operands of attention.
const OPERANDS: usize = 8;

/// The plan of a region of attention and quantisation; `None` if the region is something else, or has no kernel.
pub(in crate::ops) fn region(
    region: &Region,
    call: &CallDesc,
    device: &DeviceSpec,
) -> Result<Option<KernelPlan>> {
    let Some(op) = read(region) else { return Ok(None) };
    let query = operand(call, 0)?;
    let rows = query.shape[0];
    // By the sizes, every sequence must have at most one token.
    if rows > operand(call, 3)?.shape[0] {
        return Ok(None);
    }
    let bytes = &call.results[0];
    let (columns, dtype) = (bytes.shape[1], query.dtype);
    let mut y = TensorDesc::dense(dtype, &[rows, columns]);
    y.bounded = query.bounded;
    let Some(mut decode) = Decode::plan(&op, call, &y, device, false)? else { return Ok(None) };
    let blocks = decode.blocks_of_row();
    let vectors = [columns, bytes.strides[0]].iter().all(|size| size.is_multiple_of(VECTOR));
    if blocks.is_none() || columns > MOST_COLUMNS || !vectors {
        return Ok(None);
    }
    decode.quantise(blocks.unwrap_or_default());
    let y_bytes = (rows * columns * dtype.bytes()).next_multiple_of(256);
    let counters = decode.persistent;
    Ok(Some(KernelPlan {
        kernels: vec![decode.spec.clone()],
        workspace: y_bytes + decode.workspace,
        persistent: counters + rows * size_of::<u32>(),
        // The split of keys depends on the maximum number of sequences.
        batch_invariant: false,
        launches: Box::new(move |frame, functions, _| {
            let (bytes, scales) = (frame.result(0)?, frame.result(1)?);
            let y = Bound { desc: y.clone(), address: frame.workspace, extent: bytes.extent };
            let workspace = frame.workspace + y_bytes as u64;
            let quantised = QuantisedRows {
                y: MatrixParams::of(bytes),
                scales: scales.address,
                counters: frame.persistent + counters as u64,
            };
            let memory = [workspace, frame.persistent];
            let launch = decode.launch(frame, only(functions)?, (&y, None), memory, quantised)?;
            Ok(launch.into_iter().collect())
        }),
    }))
}

/// Reads such a body, whose operands must be those of the region in order.
fn read(region: &Region) -> Option<PagedAttention> {
    let mut reader = BodyReader::new(region);
    let (op, attention) = reader.take(|op| {
        if let Op::PagedAttention(op) = op { (op.value_size == 0).then_some(*op) } else { None }
    })?;
    let (_, quantised) = reader.take(|op| matches!(op, Op::QuantPerToken(_)).then_some(()))?;
    let in_order = (0..attention.operands.len())
        .all(|index| value(attention, index) == (index < OPERANDS).then_some(index));
    let handed_on = value(quantised, 0) == made(attention, 0);
    let whole =
        reader.is_done() && region.operands() == OPERANDS && region.results() == quantised.results.as_slice();
    (in_order && handed_on && whole).then_some(op)
}
