//! TODO

pub mod fetch;
