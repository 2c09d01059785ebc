//! What each generation of GPUs has, by name: kernels ask for a feature and not for a compute capability.

use super::DeviceSpec;
use std::ops::Range;

/// Ampere, the first generation with 16-bit tensor-core products of 16 by 8 by 16.
const AMPERE: u32 = 80;
/// Hopper, the first generation with clusters.
const HOPPER: u32 = 90;
/// Hopper and its successors for data centres. Their siblings for desktops have smaller SMs.
const DATA_CENTRE: Range<u32> = HOPPER..120;

impl DeviceSpec {
    /// Whether tensor cores multiply f16 and bf16 (`mma.m16n8k16`), and shared memory is filled by asynchronous copies.
    pub(crate) fn has_half_mma(&self) -> bool {
        self.capability >= AMPERE
    }

    /// Whether blocks form clusters, launches overlap, and bulk copies signal barriers.
    pub(crate) fn has_clusters(&self) -> bool {
        self.capability >= HOPPER
    }

    /// Whether warp groups multiply together (`wgmma`), and warps hand registers to each other (`setmaxnreg`).
    pub(crate) fn has_wgmma(&self) -> bool {
        self.capability == HOPPER
    }

    /// Whether the GPU has clusters and the large SMs of a data centre.
    pub(crate) fn has_large_sms(&self) -> bool {
        DATA_CENTRE.contains(&self.capability)
    }

    /// The maximum shared memory of a block, in bytes.
    pub(crate) fn shared_memory(&self) -> usize {
        match self.capability {
            80 | 87 => 162 << 10,
            _ if self.has_large_sms() => 226 << 10,
            _ => 98 << 10,
        }
    }
}
