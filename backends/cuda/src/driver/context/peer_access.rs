//! Opens the memory of one GPU to another.

use super::Context;
use cudarc::driver::sys::{self, CUresult};
use dsrun_core::{Error, Result};

impl Context {
    /// Enables peer access from this device to the memory of another handle of this process.
    ///
    /// # Errors
    /// [`dsrun_core::Code::Unsupported`] if there is no peer access between the devices.
    pub(crate) fn reach(&self, other: &Self) -> Result<()> {
        if self.device == other.device {
            return Ok(());
        }
        self.enter()?;
        let mut can = 0;
        // SAFETY: both devices are open; the pointer is to a place of the right type.
        let status = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, self.device, other.device) };
        self.check(status, "asking for peer access")?;
        if can == 0 {
            let message =
                format!("GPU {} has no peer access to the memory of GPU {}", self.device, other.device);
            return Err(Error::unsupported(message));
        }
        // SAFETY: both contexts are retained, and the own one is current.
        match unsafe { sys::cuCtxEnablePeerAccess(other.raw.0, 0) } {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
            status => self.check(status, "opening peer access")?,
        }
        // Memory of a pool has access rights of its own.
        let access = sys::CUmemAccessDesc {
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.device,
            },
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the pool lives as long as `other`, and the description is one of one device.
        let status = unsafe { sys::cuMemPoolSetAccess(other.pool.0, &raw const access, 1) };
        self.check(status, "opening peer access to a pool of memory")
    }
}
