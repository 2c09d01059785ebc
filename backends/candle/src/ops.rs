//! The ops, one file per family as in [`dsrun_core::op`].

mod activation;
mod attention;
mod cache;
mod elementwise;
mod embed;
mod linear;
mod moe;
mod norm;
mod quant;
mod rope;
mod sample;
mod sampling;
