//! The layer between wgpu and the kernels: context, memory, streams, transfers, shaders and pipelines.

pub(crate) mod adapter;
pub(crate) mod context;
mod disk_cache;
pub(crate) mod memory;
pub(crate) mod pinned;
pub(crate) mod pipeline;
pub(crate) mod shader;
pub(crate) mod stream;
mod timestamp;
mod transfer;
