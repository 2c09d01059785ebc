//! The kernels, one file per op family as in [`dsrun_core::op`], and the fused ones.

mod activation;
pub(crate) mod attention;
mod cache;
pub(crate) mod collective;
mod elementwise;
mod embed;
mod linear;
mod norm;
mod quant;
pub(crate) mod region;
mod rope;
mod sample;
mod sampling;
mod step;

pub(crate) use collective::Staging;
