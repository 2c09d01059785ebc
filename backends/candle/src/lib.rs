//! The reference backend of dsrun: every op in [candle-core](candle_core) tensors, formula by formula.
//!
//! It is written to be read beside the documentation of the ops in [`dsrun_core::op`]; the backend `cpu` is the fast one. Devices,
//! memory, streams and the ops that only move bytes are those of [`dsrun_host`].
//!
//! An op reads the rows below the extent of its operands as tensors, widens floats to f32, computes, and stores the result, which is
//! the only rounding. Plain Rust does what candle has no ops for: looking up pages and indices, and drawing tokens. Weights are
//! decoded when they are packed, to f32, or to integers and a scale for each row where an op multiplies by the integers.
//!
//! | module | holds |
//! |---|---|
//! | `backend` | the backend |
//! | `failure` | errors of dsrun and of candle |
//! | `kernels` | from an op to its function |
//! | `ops` | one file per op family, as in `dsrun_core::op` |
//! | `tensor` | operands as tensors, and tensors as results |
//! | `weight` | decoded weights |

mod backend;
mod failure;
mod kernels;
mod ops;
mod tensor;
mod weight;

pub use backend::CandleBackend;
