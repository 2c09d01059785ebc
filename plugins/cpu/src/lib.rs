//! The CPU backend as a plugin: the same backend that is linked into `dsrun`, behind the C ABI.

dsrun_plugin_sdk::export_backend!(dsrun_cpu::CpuBackend::new());
