//! Tests of the server over real connections, with a tiny model.

mod access;
mod answers;
mod async_openai;
mod encoder;
mod fields;
mod fuzz;
mod hostile;
mod lifecycle;
mod memory;
mod messages;
mod model;
mod reasoning;
mod replicas;
mod rerank;
mod responses;
mod structured;
mod support;
mod tool_calls;
mod traces;
