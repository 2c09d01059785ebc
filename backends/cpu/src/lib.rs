//! The CPU backend of dsrun, linked into the program as its default: packed weights, and SIMD kernels chosen at run time.
//!
//! # How it is built
//!
//! - A [`CpuBackend`] has one device, the host's processors. Each handle opened on it is a device of its own: a thread
//!   pool, an account of memory, and one lock.
//! - Streams do not queue: a call runs on the thread that enqueues it, and is done when `enqueue` returns. Streams and
//!   events therefore have nothing to wait for.
//! - A call holds its device's lock while it touches memory. Threads may use one device at the same time; their calls take
//!   turns, and each call spreads its work over the pool. The lock is what makes it sound to turn buffers into slices: no
//!   two calls ever see the same memory at once. Collectives let go of the lock while they wait for other ranks.
//! - Binding checks all bounds and overlaps again, so that no sequence of safe calls reaches memory it should not.
//! - Kernels work on rows of f32. Other float types are widened row by row and rounded once when a row is stored; f32 is
//!   used in place.
//! - Indices that come from device memory (ids, slots, pages, requests, rows) are checked at every use and act as their op
//!   documents: they skip or give zeros.
//!
//! | module | holds |
//! |---|---|
//! | `device` | backend, device handle, its lock and threads |
//! | `memory` | buffers and the memory account |
//! | `stream` | streams and events |
//! | `view` | operands as slices of rows |
//! | `graph` | lists of calls that run without leaving the pool |
//! | `kernels` | query, prepack, plan, bind |
//! | `ops` | one file per op family, as in `dsrun_core::op` |
//! | `packed` | packed weights and their product |
//! | `simd` | dot products, weighted sums, exponentials |
//! | `parallel` | loops over threads, scratch memory |

mod device;
mod graph;
mod kernels;
mod memory;
mod ops;
mod packed;
mod parallel;
mod simd;
mod stream;
#[cfg(test)]
mod tests;
mod view;

pub use device::CpuBackend;
