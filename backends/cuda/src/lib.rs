//! The CUDA backend of dsrun: every op of `llm-core-1` on NVIDIA GPUs of compute capability 7.5 and up.
//!
//! # How it is built
//!
//! - Nothing of CUDA is linked. Driver, NVRTC and cuBLASLt are opened when they are first needed; without them the backend
//!   is there and says what it misses.
//! - Kernels are CUDA C++ in `kernels/`, one folder per family, embedded as text and compiled by NVRTC for the device at
//!   hand. What differs from call to call (element types, head sizes) is a `-D` constant. Binaries are kept on disk.
//! - An op becomes a *recipe* (`ops`): which kernels it needs, how much scratch memory, and how bound tensors turn into
//!   launches. A plan is a recipe with its kernels loaded; a bound call is a list of launches with all parameters filled in.
//! - Rows past an extent are skipped by the kernels themselves, which read the extent from device memory: nothing of a call
//!   depends on the host after it is bound, so any sequence of calls can be captured and replayed as a graph.
//! - Indices from device memory (ids, slots, pages, requests, rows) are checked at every use and act as their op documents.
//!
//! | module | holds |
//! |---|---|
//! | `device` | backend, device handle, properties |
//! | `ahead` | a device that is not here, whose kernels are built |
//! | `part` | GPUs that need not be here, by name |
//! | `library` | which libraries are there, and where they were looked for |
//! | `diagnose` | what is found of them, for people |
//! | `context` | what all objects of a handle share: the CUDA context, its account, loaded kernels |
//! | `recent` | what was enqueued last, for messages |
//! | `fault` | CUDA's errors as ours; faults that stay |
//! | `memory` | buffers, pinned staging, the stream-ordered pool |
//! | `stream` | streams and events; every wait polls and has a limit |
//! | `graph` | capture and replay |
//! | `compiler` | NVRTC and the cache on disk |
//! | `source` | the embedded kernel sources |
//! | `spec` | what a kernel is before it is built, and the device it is for |
//! | `launch` | kernel launches and their parameters |
//! | `blas` | products of many rows, by cuBLASLt |
//! | `weight` | packed weights |
//! | `kernels` | query, prepack, plan, bind |
//! | `ops` | recipes, one file per op family as in `dsrun_core::op` |

mod ahead;
mod blas;
pub mod compiler;
mod context;
mod device;
mod diagnose;
mod fault;
mod graph;
mod kernels;
mod launch;
pub mod library;
mod memory;
mod ops;
mod part;
mod recent;
mod source;
mod spec;
mod stream;
mod weight;

pub use device::CudaBackend;
pub use ops::{
    copy_kernel, kernel_specs, layers::Shape as LayersShape, next_token::next_token_kernel,
    quantised::quantised_kernel,
};
pub use spec::{KernelSpec, Machine};
