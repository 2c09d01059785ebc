//! The oracle: all ops in plain scalar f64, one file per family, written from the documentation in `dsrun_core::op`.
//!
//! The code is not fast, and none of it is shared with a backend. Inputs are plain slices, already rounded to the type they
//! are stored in. A float result is a [`Real`], which has the size of its terms beside the value, because the error of f32
//! arithmetic scales with the terms and not with the value.

pub mod activation;
pub mod attention;
pub mod cache;
pub mod chain;
pub mod collective;
pub mod elementwise;
pub mod embed;
pub mod linear;
pub mod moe;
pub mod norm;
pub mod philox;
pub mod quant;
pub mod rope;
pub mod sampling;
pub mod step;
pub mod weight;

pub use crate::{float, real::Real};
