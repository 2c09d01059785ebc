//! The properties of a GPU that kernels are chosen and sized by.

pub(crate) mod crossover;
mod features;
pub(crate) mod known_gpus;
pub(crate) mod tuner;

use crate::driver::library::Library;

/// The oldest GPUs that are supported: compute capability 7.5.
pub(crate) const OLDEST_CAPABILITY: u32 = 75;
/// The environment variable that disables custom GEMM kernels in favour of cuBLASLt, for comparison.
const NO_CUSTOM_GEMM: &str = "DSRUN_CUDA_NO_CUSTOM_GEMM";

/// The properties of a GPU that kernels are planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSpec {
    /// Compute capability, major times ten plus minor.
    pub capability: u32,
    /// Streaming multiprocessors.
    pub sm_count: usize,
    /// Whether cuBLASLt is there.
    pub blas: bool,
    /// Whether custom GEMM kernels are used for dense weights where they are faster than cuBLASLt.
    pub custom_gemm: bool,
    /// Whether other ranks share the GPU, whose kernels may wait for kernels of this rank.
    pub shared: bool,
    /// Whether only kernels are chosen that compute a row in the same order of operations whatever the number of rows.
    pub batch_invariant: bool,
}

impl DeviceSpec {
    /// A GPU of this compute capability that no other rank uses, with cuBLASLt, for the fastest kernels.
    pub const fn usual(capability: u32, sm_count: usize) -> Self {
        Self { capability, sm_count, blas: true, custom_gemm: true, shared: false, batch_invariant: false }
    }

    /// The same, with the libraries found on this machine.
    pub(crate) fn new(capability: u32, sm_count: usize) -> Self {
        let custom_gemm = std::env::var_os(NO_CUSTOM_GEMM).is_none();
        Self { blas: Library::CublasLt.is_present(), custom_gemm, ..Self::usual(capability, sm_count) }
    }
}

/// A compute capability in its usual notation, such as `9.0`.
pub(crate) fn written(capability: u32) -> String {
    format!("{}.{}", capability / 10, capability % 10)
}
