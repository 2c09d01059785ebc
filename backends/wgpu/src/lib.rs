//! The portable GPU backend of dsrun: kernels in WGSL on Vulkan, Metal and Direct3D 12, through wgpu.
//!
//! A call is planned as a list of dispatches, each with its shader, constants and grid, from the description of the call only.
//! Binding creates the bind groups and uniforms. Enqueueing encodes the dispatches into a command buffer, which a stream submits
//! when it holds many dispatches, or when something waits.
//!
//! | module | holds |
//! |---|---|
//! | `backend` | the backend, its adapters, and open devices |
//! | `driver` | context, memory, streams, transfers, shaders and pipelines |
//! | `exchange` | collectives, through host memory |
//! | `kernels` | query, prepack, plan, bind, enqueue |
//! | `probe` | whether an adapter flushes subnormal numbers |
//! | `ops` | plans calls as dispatches, one file per op family |
//! | `kernels/*.wgsl` | the shaders, one file per family |

mod backend;
mod driver;
mod exchange;
mod kernels;
mod ops;
mod probe;

pub use backend::WgpuBackend;
