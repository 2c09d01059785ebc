//! Matrix products: dense and quantised linear layers, by themselves and fused with what precedes and follows them.

pub(super) mod decode_gemm;
pub(super) mod fused_linear;
mod int8;
mod linear;
mod packed_gemm;
mod small_batch;
mod weight_only;

pub(super) use fused_linear::{FusedLinear, plan as fused};
pub(super) use linear::{linear, linear_w8a8, matmul};
