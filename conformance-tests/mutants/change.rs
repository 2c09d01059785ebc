//! Changes to what a call reads, and to what it has written.

use crate::{tensor::Copied, wrap::Run};
use dsrun_core::{
    Result,
    device::{BufferSlice, Stream},
    kernels::Argument,
};
use half::bf16;

/// Another last bit in every element.
pub(crate) fn flip(_: &Run, tensor: &mut Copied) {
    (0..tensor.count()).for_each(|index| tensor.set_bits(index, tensor.bits(index) ^ 1));
}

/// Rounds every element to bf16.
pub(crate) fn round(_: &Run, tensor: &mut Copied) {
    for index in 0..tensor.count() {
        tensor.set_float(index, bf16::from_f32(tensor.float(index)).to_f32());
    }
}

/// A tensor operand.
pub(crate) fn copied(run: &Run, stream: &mut dyn Stream, index: usize) -> Result<Option<Copied>> {
    match (run.operand(index), run.arguments.operands.get(index)) {
        (Some(desc), Some(Some(Argument::Tensor(binding)))) => Copied::read(stream, desc, binding).map(Some),
        _ => Ok(None),
    }
}

/// Runs a call; if it is of this op, on an operand that is changed meanwhile.
pub(crate) fn operand(
    run: &Run,
    stream: &mut dyn Stream,
    op: &str,
    index: usize,
    change: impl FnOnce(&Run, &mut Copied),
) -> Result<()> {
    if run.op() != op {
        return run.right(stream);
    }
    let Some(original) = copied(run, stream, index)? else { return run.right(stream) };
    let mut changed = original.clone();
    change(run, &mut changed);
    changed.write(stream)?;
    let outcome = run.right(stream);
    original.write(stream)?;
    outcome
}

/// Runs a call; if it is of this op, changes a result.
pub(crate) fn result(
    run: &Run,
    stream: &mut dyn Stream,
    op: &str,
    index: usize,
    change: impl FnOnce(&Run, &mut Copied),
) -> Result<()> {
    run.right(stream)?;
    if run.op() == op { change_result(run, stream, index, change) } else { Ok(()) }
}

pub(crate) fn change_result(
    run: &Run,
    stream: &mut dyn Stream,
    index: usize,
    change: impl FnOnce(&Run, &mut Copied),
) -> Result<()> {
    let (Some(desc), Some(binding)) = (run.call.results.get(index), run.arguments.results.get(index)) else {
        return Ok(());
    };
    let mut tensor = Copied::read(stream, desc, binding)?;
    change(run, &mut tensor);
    tensor.write(stream)
}

/// Writes one element behind a result.
pub(crate) fn write_behind(run: &Run, stream: &mut dyn Stream, index: usize) -> Result<()> {
    let (desc, slice) = (&run.call.results[index], &run.arguments.results[index].slice);
    let (end, size) = (slice.offset + desc.bytes()?, desc.dtype.bytes());
    stream.upload(&[0xEE; 8][..size], &BufferSlice::new(slice.buffer.clone(), end, size)?)
}
