//! The hardware-abstraction layer of dsrun.
//!
//! A model is a [`program::Program`] of primitive [`op`]s over tensors, states and weights. Passes rewrite the program and
//! backends run it; this crate defines the vocabulary of both. It depends on no other crate of dsrun.
//!
//! | module | holds |
//! |---|---|
//! | [`op`] | the ops: attributes, formulas, shape inference, iteration spaces |
//! | [`program`] | programs of ops; their text form |
//! | [`region`] | fused ops: small programs that a backend may run as one kernel |
//! | [`cache_row`] | how KV caches store the elements of a head |
//! | [`placement`] | how a value is distributed over a device mesh |
//! | [`device`] | backends, devices, memory, streams |
//! | [`kernels`] | planning and running ops |
//! | [`checked`] | the checks in front of every backend |
//! | [`lowered_region`] | running a fused op as its body |
//! | [`graph`] | capturing and replaying bound calls |
//! | [`host_memory`] | how much memory the host has left |
//! | [`collective`] | groups of ranks; collectives over host memory |
//! | [`registry`] | the backends of this process |

pub mod cache_row;
pub mod collective;
mod dtype;
mod error;
mod format;
mod hal;
pub mod host_memory;
mod ir;
pub mod placement;
pub mod registry;
mod tensor;
mod weight;

pub use dtype::DType;
pub use error::{Code, Error, Result};
pub use format::{
    Affine, BlockFormat, GroupBits, GroupFormat, GroupOffset, GroupRow, GroupSize, ScaleType, WeightFormat,
    six_bit_factors,
};
pub use hal::{checked, device, graph, kernels, lowered_region};
pub use ir::{op, program, region};
pub use tensor::{Size, TensorDesc, TensorType};
pub use weight::{BytesReader, WeightExpr, WeightReader, WeightType};
