//! Copies of the operands of a call.

use crate::tensor;
use dsrun_core::{
    Result,
    device::{BufferSlice, Stream},
    kernels::{Argument, Arguments},
};

/// The bytes of the tensor operands of a call, and of all extents.
#[derive(Debug)]
pub(crate) struct Snapshot {
    operands: Vec<(BufferSlice, Vec<u8>)>,
    extents: Vec<(BufferSlice, Vec<u8>)>,
}

impl Snapshot {
    pub(crate) fn take(stream: &mut dyn Stream, arguments: &Arguments) -> Result<Self> {
        let tensors = || {
            arguments.operands.iter().filter_map(|argument| match argument {
                Some(Argument::Tensor(binding)) => Some(binding),
                _ => None,
            })
        };
        let mut read = |slice: &BufferSlice| Ok((slice.clone(), tensor::bytes(stream, slice)?));
        let extents = tensors().chain(&arguments.results).filter_map(|binding| binding.extent.as_ref());
        Ok(Self {
            operands: tensors().map(|binding| read(&binding.slice)).collect::<Result<_>>()?,
            extents: extents.map(&mut read).collect::<Result<_>>()?,
        })
    }

    /// Brings the operands back.
    pub(crate) fn restore_operands(&self, stream: &mut dyn Stream) -> Result<()> {
        self.operands.iter().try_for_each(|(slice, bytes)| stream.upload(bytes, slice))
    }

    /// Brings back all that the call does not update.
    pub(crate) fn restore_unless_updated(
        &self,
        stream: &mut dyn Stream,
        arguments: &Arguments,
    ) -> Result<()> {
        self.restore_extents(stream)?;
        let is_updated =
            |slice: &BufferSlice| arguments.results.iter().any(|result| result.slice.same(slice));
        let mut kept = self.operands.iter().filter(|(slice, _)| !is_updated(slice));
        kept.try_for_each(|(slice, bytes)| stream.upload(bytes, slice))
    }

    /// Brings the extents back.
    pub(crate) fn restore_extents(&self, stream: &mut dyn Stream) -> Result<()> {
        self.extents.iter().try_for_each(|(slice, bytes)| stream.upload(bytes, slice))
    }
}
