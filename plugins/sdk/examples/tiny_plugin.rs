//! The tiny backend of the tests as a plugin, for `tests/library.rs`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[allow(dead_code, reason = "tests use more of it")]
#[path = "../tests/support/tiny.rs"]
mod tiny;

dsrun_plugin_sdk::export_backend!(tiny::Tiny::new());
