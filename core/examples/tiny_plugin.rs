//! The tests' tiny backend as a plugin, for `tests/abi_library.rs`.

#[allow(dead_code, reason = "tests use more of it")]
#[path = "../tests/support/tiny.rs"]
mod tiny;

dsrun_core::export_backend!(tiny::Tiny::new());
