//! The CUDA backend as a plugin. It loads on a machine without CUDA, and then says what is missing.

dsrun_plugin_sdk::export_backend!(dsrun_cuda::CudaBackend::new());
