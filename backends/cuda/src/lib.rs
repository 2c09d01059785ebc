//! The CUDA backend of dsrun: every op of `llm-core-1`, `llm-quant-1`, `llm-moe-1` and `llm-dist-1` on NVIDIA GPUs of compute capability 7.5 and up.
//!
//! # How it is built
//!
//! - Nothing of CUDA is linked. Driver, NVRTC, cuBLASLt and NCCL are opened when they are first needed; without them the backend
//!   is there and says what it misses.
//! - Kernels are CUDA C++ in `kernels/`, one folder per family, embedded as text and compiled by NVRTC for the device at
//!   hand. What differs from call to call (element types, head sizes) is a `-D` constant. Binaries are kept on disk.
//! - A call becomes a `KernelPlan` (in `ops`): which kernels it needs, how much scratch memory, and how bound tensors
//!   turn into launches. A bound call is a list of launches with all parameters filled in.
//! - What is launched is what the program says: a fused kernel is the plan of a region, and nothing is fused behind the
//!   program's back. See `ops::region` for the bodies that have kernels.
//! - Rows past an extent are skipped by the kernels themselves, which read the extent from device memory: nothing of a call
//!   depends on the host after it is bound, so any sequence of calls can be captured and replayed as a graph.
//! - Indices from device memory (ids, slots, pages, requests, rows) are checked at every use and act as their op documents.
//!
//! # Rooms, in the order in which they may use each other
//!
//! | room | holds |
//! |---|---|
//! | `driver` | context, streams, memory, graphs, faults, NCCL, the kernel compiler and its cache |
//! | `arch` | what a GPU has that kernels are chosen and sized by |
//! | `collective` | groups of ranks, and the memory that they exchange data in |
//! | `ops` | from a call to its launches, one file or folder per op family |
//! | `kernels` | the traits of core: query, prepack, plan, bind |
//! | `device`, `offline_device`, `properties` | a device that is here, and one for which kernels are only built |
//! | `diagnose` | what of CUDA is on this machine, for people |

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
pub use ops::{exchange_kernel_specs, gemm_table, generated_headers, kernel_specs};
