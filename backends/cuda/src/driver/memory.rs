//! Buffers on the device and on the host, and the messages of memory that is exhausted.

use crate::driver::{context::Context, pinned::PinnedMemory};
use dsrun_core::{
    Code, Error, Result,
    device::{Buffer, BufferSlice, MemoryAccount, MemoryKind, MemoryReservation},
};
use std::{fmt, ptr::NonNull, sync::Arc};

/// The alignment of operands in bytes: required by cuBLASLt, and more than any vector load needs.
pub(crate) const ALIGNMENT: usize = 256;

/// Reserves memory of the device.
///
/// # Errors
/// [`Code::OutOfMemory`] if the limit of the handle would be exceeded.
fn reserve(account: &Arc<MemoryAccount>, bytes: usize) -> Result<MemoryReservation> {
    account.reserve(bytes).ok_or_else(|| {
        let message = format!(
            "{} wanted, but of the {} that this handle of the device may hold {} are left; take a smaller model, batch \
             or KV cache, or raise the memory limit",
            Size(bytes as u64),
            Size(account.limit().unwrap_or(u64::MAX)),
            Size(account.free().unwrap_or(u64::MAX))
        );
        Error::new(Code::OutOfMemory, message)
    })
}

/// Explains an out-of-memory error of the driver: the free and the total memory of the device, and the bytes `used` by this
/// handle.
pub(crate) fn shortage(used: u64, free: u64, total: u64) -> String {
    let others = total.saturating_sub(free).saturating_sub(used);
    format!(
        "this handle holds {} of the device's {}, {} are free, and {} are held by others; end what else runs there, or take a smaller \
         model, batch or KV cache",
        Size(used),
        Size(total),
        Size(free),
        Size(others)
    )
}

/// A number of bytes, displayed in binary units.
pub(crate) struct Size(pub(crate) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.0 as f64;
        match self.0 {
            0..1024 => write!(f, "{} B", self.0),
            1024..0x10_0000 => write!(f, "{:.1} KiB", size / 1024.0),
            0x10_0000..0x4000_0000 => write!(f, "{:.1} MiB", size / 1_048_576.0),
            _ => write!(f, "{:.1} GiB", size / 1_073_741_824.0),
        }
    }
}

/// Zeroed memory, freed after all work that was enqueued before the drop.
#[derive(Debug)]
pub(crate) struct CudaBuffer {
    pub(crate) context: Arc<Context>,
    /// The device address; 0 if the buffer is empty.
    pub(crate) pointer: u64,
    host: Option<PinnedMemory>,
    bytes: usize,
    kind: MemoryKind,
    _reservation: Option<MemoryReservation>,
}

impl CudaBuffer {
    /// Allocates.
    pub(crate) fn new(context: Arc<Context>, bytes: usize, kind: MemoryKind) -> Result<Self> {
        match kind {
            MemoryKind::Device => {
                let reservation = reserve(&context.account, bytes)?;
                let pointer = if bytes == 0 { 0 } else { context.allocate(bytes)? };
                Ok(Self { context, pointer, host: None, bytes, kind, _reservation: Some(reservation) })
            }
            MemoryKind::Pinned => {
                context.enter()?;
                let host = PinnedMemory::new(bytes, |status, what| context.check(status, what))?;
                let pointer = host.pointer();
                Ok(Self { context, pointer, host: Some(host), bytes, kind, _reservation: None })
            }
        }
    }

    /// The buffer and the device address of a slice; fails unless the buffer belongs to this handle and contains the slice.
    pub(crate) fn locate(slice: &BufferSlice, context: &Arc<Context>) -> Result<(Arc<Self>, u64)> {
        let buffer = slice.own_buffer(|buffer: &Self| Arc::ptr_eq(&buffer.context, context))?;
        let pointer = buffer.pointer + slice.offset as u64;
        Ok((buffer, pointer))
    }

    /// The host address of a pinned buffer.
    pub(crate) fn host(&self) -> Option<*mut u8> {
        self.host.as_ref().map(|host| host.host().as_ptr())
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        match self.host.take() {
            Some(host) => {
                // All work that uses the memory is done, and the context is current.
                self.context.settle();
                drop(host);
            }
            None if self.pointer != 0 => self.context.release(self.pointer),
            None => {}
        }
    }
}

impl Buffer for CudaBuffer {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }

    fn host_pointer(&self) -> Option<NonNull<u8>> {
        self.host.as_ref().map(PinnedMemory::host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_keeps_to_its_limit_and_says_what_is_left() {
        let account = MemoryAccount::new(Some(3 << 20));
        let held = reserve(&account, 2 << 20).unwrap();
        let error = reserve(&account, 2 << 20).unwrap_err();
        assert_eq!(error.code(), Code::OutOfMemory);
        let says =
            "2.0 MiB wanted, but of the 3.0 MiB that this handle of the device may hold 1.0 MiB are left";
        assert!(error.message().starts_with(says), "{error}");
        drop(held);
        assert!(reserve(&account, 3 << 20).is_ok());
    }

    #[test]
    fn a_shortage_names_who_holds_what() {
        let says = "this handle holds 10.0 GiB of the device's 139.8 GiB, 2.0 MiB are free, and 129.8 GiB are held by others";
        let found = shortage(10 << 30, 2 << 20, (139 << 30) + (819 << 20));
        assert!(found.starts_with(says), "{found}");
        // What a driver says need not add up.
        assert!(shortage(2 << 30, 1 << 30, 1 << 30).contains("and 0 B are held by others"));
    }
}
