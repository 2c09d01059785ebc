//! The kernels, one file per op family as in [`dsrun_core::op`], and the fused kernels.

mod activation;
pub(crate) mod attention;
mod cache;
mod elementwise;
mod embed;
mod linear;
mod moe;
mod norm;
mod quant;
pub(crate) mod region;
mod rope;
mod sample;
mod sampling;
