//! What a model is made of: ops, programs of them, and regions, which are fused ops.

pub mod op;
pub mod program;
pub mod region;
