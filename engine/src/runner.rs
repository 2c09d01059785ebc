//! Runs steps: inputs, request table, readback.

pub(crate) mod hidden_states;
pub(crate) mod inputs;
pub(crate) mod pooler;
pub(crate) mod readback;
pub(crate) mod request_table;
mod step;
mod step_size;
mod token_limits;
mod warm_up;
