//! Faults with pinned memory: it is taken for a copy of itself.

use super::Shared;
use dsrun_core::{
    Result,
    device::{BufferSlice, MemoryKind},
    kernels::Argument,
};
use std::time::Duration;

impl Shared {
    /// A copy of memory, made at once.
    pub(super) fn copied(&self, memory: &BufferSlice) -> Result<BufferSlice> {
        let copy = BufferSlice::whole(self.inner.allocate(memory.bytes, MemoryKind::Device)?);
        let mut stream = self.inner.stream()?;
        stream.copy(memory, &copy)?;
        stream.synchronize("the copy of a range of memory", Duration::from_secs(10))?;
        Ok(copy)
    }

    /// Replaces a tensor in pinned memory by a copy in device memory.
    pub(super) fn unpin(&self, argument: &mut Argument) -> Result<()> {
        if let Argument::Tensor(binding) = argument
            && binding.slice.buffer.kind() == MemoryKind::Pinned
        {
            binding.slice = self.copied(&binding.slice)?;
        }
        Ok(())
    }
}
