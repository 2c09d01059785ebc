//! The wgpu backend as a plugin.

dsrun_plugin_sdk::export_backend!(dsrun_wgpu::WgpuBackend::new());
