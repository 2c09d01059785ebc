//! CUDA as the backend uses it: context, streams, memory, graphs, faults, NCCL, the kernel compiler and its cache.

pub mod compiler;
pub(crate) mod context;
pub(crate) mod cublaslt;
pub(crate) mod fault;
pub(crate) mod graph;
pub(crate) mod kernel_spec;
pub(crate) mod kernel_struct;
pub(crate) mod launch;
pub mod library;
pub(crate) mod memory;
pub(crate) mod nccl;
pub(crate) mod pinned;
pub(crate) mod raw;
pub(crate) mod recent;
pub(crate) mod rendezvous;
pub(crate) mod source;
pub(crate) mod stream;
pub(crate) mod tensor_map;
