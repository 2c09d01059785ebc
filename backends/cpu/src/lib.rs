//! The CPU backend of dsrun, linked into the program as its default: packed weights, and SIMD kernels chosen at run time.
//!
//! Devices, memory and streams are those of [`dsrun_host`], whose page also says how calls take turns. Kernels work on rows of
//! f32: other float types are widened row by row and rounded once when a row is stored; f32 is used in place.
//!
//! | module | holds |
//! |---|---|
//! | `device` | the backend |
//! | `kernels` | the kernel of each op |
//! | `ops` | one file per op family, as in `dsrun_core::op` |
//! | `floats` | float tensors of any type, read and written as f32 |
//! | `packed` | packed weights and their product |
//! | `simd` | dot products, weighted sums, exponentials |
//! | `parallel` | loops over threads, scratch memory |

mod device;
mod floats;
mod kernel;
mod kernels;
mod lanes;
mod ops;
mod packed;
mod parallel;
mod simd;

pub use device::CpuBackend;
