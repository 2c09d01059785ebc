//! Buffers in device memory and in pinned memory.

use super::{context::Context, pinned::HostMemory};
use dsrun_core::{
    Code, Error, Result,
    device::{Buffer, BufferSlice, MemoryAccount, MemoryKind, MemoryReservation},
};
use std::{fmt, ptr::NonNull, sync::Arc};
use wgpu::{BufferDescriptor, BufferUsages};

/// The lengths of buffers are multiples of this, so that a kernel can read the last element as part of a vector.
const UNIT: u64 = 256;

fn exhausted(account: &MemoryAccount, bytes: usize) -> Error {
    let free = account.free().map_or_else(|| "unknown".to_owned(), |free| free.to_string());
    let message = format!(
        "{bytes} bytes of device memory wanted, {free} bytes free, {} in use; use a smaller model or batch, or raise \
         the memory limit",
        account.used()
    );
    Error::new(Code::OutOfMemory, message)
}

/// The storage of a buffer.
#[derive(Debug)]
pub(crate) enum Storage {
    /// Device memory.
    Device(wgpu::Buffer),
    /// Host memory, which streams can copy from and to, but kernels cannot access.
    Host(Arc<HostMemory>),
}

/// A buffer of a device handle.
pub(crate) struct WgpuBuffer {
    pub(crate) storage: Storage,
    bytes: usize,
    context: Arc<Context>,
    _reservation: MemoryReservation,
}

impl WgpuBuffer {
    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// [`Code::OutOfMemory`] if the limit of the handle, of a buffer of the adapter, or of the memory is exceeded.
    pub(crate) fn new(context: Arc<Context>, bytes: usize, kind: MemoryKind) -> Result<Self> {
        let exhausted = || exhausted(&context.account, bytes);
        let reservation = context.account.reserve(bytes).ok_or_else(exhausted)?;
        let storage = match kind {
            MemoryKind::Pinned => Storage::Host(Arc::new(HostMemory::new(bytes).ok_or_else(exhausted)?)),
            MemoryKind::Device => Storage::Device(allocate(&context, bytes)?),
        };
        Ok(Self { storage, bytes, context, _reservation: reservation })
    }

    /// The buffer of a slice, if the slice lies in a buffer of this device handle.
    ///
    /// # Errors
    /// If it belongs to another backend or handle, or the slice exceeds its buffer.
    pub(crate) fn locate(slice: &BufferSlice, context: &Arc<Context>) -> Result<Arc<Self>> {
        slice.own_buffer(|buffer: &Self| Arc::ptr_eq(&buffer.context, context))
    }

    /// The device memory, on which kernels work.
    ///
    /// # Errors
    /// If the buffer is in pinned memory.
    pub(crate) fn device_memory(&self) -> Result<&wgpu::Buffer> {
        match &self.storage {
            Storage::Device(buffer) => Ok(buffer),
            Storage::Host(_) => Err(Error::unsupported(
                "is in pinned memory, which kernels of this backend cannot reach; copy it to device memory",
            )
            .field("buffer")),
        }
    }
}

/// Allocates device memory, a whole number of units, which wgpu zeroes before its first use.
fn allocate(context: &Context, bytes: usize) -> Result<wgpu::Buffer> {
    let longest = context.spec.limits.max_buffer_size;
    let size = (bytes as u64).max(1).checked_next_multiple_of(UNIT).filter(|size| *size <= longest);
    let Some(size) = size else {
        let message = format!("{bytes} bytes wanted, but a buffer of this adapter has at most {longest}");
        return Err(Error::new(Code::OutOfMemory, message));
    };
    context.check()?;
    let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
    let descriptor = BufferDescriptor { label: None, size, usage, mapped_at_creation: false };
    context.scoped(&format!("allocating {bytes} bytes"), || context.device.create_buffer(&descriptor))
}

impl Buffer for WgpuBuffer {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn kind(&self) -> MemoryKind {
        match self.storage {
            Storage::Device(_) => MemoryKind::Device,
            Storage::Host(_) => MemoryKind::Pinned,
        }
    }

    fn host_pointer(&self) -> Option<NonNull<u8>> {
        match &self.storage {
            Storage::Device(_) => None,
            Storage::Host(memory) => Some(memory.pointer()),
        }
    }
}

impl fmt::Debug for WgpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WgpuBuffer")
            .field("bytes", &self.bytes)
            .field("kind", &self.kind())
            .finish_non_exhaustive()
    }
}
