//! From model files to programs: fixtures of every architecture and switch, broken files, presets.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

#[path = "architectures/configs.rs"]
mod configs;
#[path = "architectures/encoders.rs"]
mod encoders;
#[path = "architectures/fixtures.rs"]
mod fixtures;
#[path = "architectures/gguf.rs"]
mod gguf;
#[path = "architectures/gguf_families.rs"]
mod gguf_families;
#[path = "architectures/gguf_parts.rs"]
mod gguf_parts;
#[path = "architectures/latents.rs"]
mod latents;
#[path = "architectures/presets.rs"]
mod presets;
#[path = "architectures/programs.rs"]
mod programs;
#[path = "architectures/published.rs"]
mod published;
#[path = "architectures/switches.rs"]
mod switches;
