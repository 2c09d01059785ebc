//! The traits that a backend implements: devices and their memory, kernels, graphs; and the checks in front of them.

pub mod checked;
pub mod device;
pub mod graph;
pub mod kernels;
pub mod lowered_region;
