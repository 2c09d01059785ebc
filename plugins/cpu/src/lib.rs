//! The CPU backend as a plugin: the same backend that is linked into `dsrun`, behind the C ABI.

dsrun_core::export_backend!(dsrun_cpu::CpuBackend::new());
