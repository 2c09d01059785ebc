//! The device properties that the backend reports to core, for real and offline devices.

use crate::driver::memory::ALIGNMENT;
use dsrun_core::{
    DType,
    device::{DeviceProperties, Flushed},
    op::Profile,
};

/// Bytes of a device's memory reserved for the driver and for loaded kernels.
const RESERVE: u64 = 256 << 20;

/// The properties of a GPU with this name and memory.
pub(crate) fn properties(name: String, memory_bytes: u64) -> DeviceProperties {
    DeviceProperties {
        name,
        memory_bytes,
        alignment: ALIGNMENT,
        dtypes: vec![DType::BF16, DType::F16, DType::F32],
        profiles: vec![
            Profile::LlmCore1,
            Profile::LlmQuant1,
            Profile::LlmMoe1,
            Profile::LlmMla1,
            Profile::LlmDist1,
        ],
        strict_nan: true,
        flushed: Flushed::default(),
        unified_memory: false,
        binds_pinned: true,
    }
}

/// Bytes that a handle may hold of a device with this much memory, unless the user sets a limit.
pub(crate) fn reserved(total: u64) -> u64 {
    total.saturating_sub(RESERVE)
}
