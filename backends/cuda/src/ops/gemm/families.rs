//! The GEMM kernel families, one file each. [`super::select`] lists them in the order in which they are tried.

pub(super) mod batch_wgmma;
mod bulk_copies;
pub(super) mod cublaslt;
pub(super) mod decode_gemm;
pub(super) mod int8_mma;
pub(super) mod int8_wgmma;
pub(super) mod packed_gemm;
pub(super) mod packed_plain;
pub(super) mod packed_wgmma;
pub(super) mod skinny;
pub(super) mod skinny_mma;
mod staged_activations;
pub(super) mod stream;
pub(super) mod tile_wgmma;
pub(super) mod tiled;
