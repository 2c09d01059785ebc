//! The CUDA backend of dsrun: every op of `llm-core-1`, `llm-quant-1`, `llm-moe-1`, `llm-mla-1` and `llm-dist-1` on NVIDIA GPUs of compute capability 7.5 and up.
//!
//! # How it is built
//!
//! - No CUDA library is linked. Driver, NVRTC, cuBLASLt and NCCL are loaded when they are first needed; without them the backend
//!   exists and reports what is missing.
//! - Kernels are CUDA C++ in `kernels/`, one folder per family, embedded as text and compiled by NVRTC for the device.
//!   What differs between calls (element types, head sizes) is a `-D` constant. Binaries are cached on disk.
//! - A call becomes a `KernelPlan` (in `ops`): its kernels, its scratch memory, and a function that makes its
//!   launches from bound tensors. A bound call is a list of launches with all parameters filled in.
//! - A fused kernel is always the plan of a region of the program; there is no hidden fusion. `ops::region` lists the
//!   bodies that have kernels.
//! - Kernels read extents from device memory and skip rows past them: a bound call does not depend on the host, so any
//!   sequence of calls can be captured and replayed as a graph.
//! - Indices from device memory (ids, slots, pages, requests, rows) are bounds-checked at every use, with the effect that their
//!   op documents.
//!
//! # Rooms, in the order in which they may use each other
//!
//! | room | holds |
//! |---|---|
//! | `driver` | context, streams, memory, graphs, faults, NCCL, the kernel compiler and its cache |
//! | `arch` | GPU properties by which kernels are chosen and sized |
//! | `collective` | groups of ranks, and the memory through which they exchange data |
//! | `ops` | from a call to its launches, one file or folder per op family |
//! | `kernels` | the traits of core: query, prepack, plan, bind |
//! | `device`, `offline_device`, `properties` | a real device, and one for which kernels are only compiled |
//! | `diagnose` | diagnostics: the CUDA libraries of this machine |

mod arch;
mod collective;
mod device;
mod diagnose;
mod driver;
mod kernels;
mod offline_device;
mod ops;
mod properties;

pub use arch::DeviceSpec;
pub use device::CudaBackend;
pub use driver::{compiler, kernel_spec::KernelSpec, library, stream::copy_kernel};
pub use ops::{
    exchange_kernel_specs, gemm_table, generated_headers, kernel_specs, summed_decoder_kernel_specs,
};
