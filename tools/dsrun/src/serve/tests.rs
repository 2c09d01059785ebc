//! Tests of the server over real connections, with a tiny model.

mod access;
mod answers;
mod async_openai;
mod fields;
mod hostile;
mod lifecycle;
mod messages;
mod model;
mod responses;
mod structured;
mod support;
mod tool_calls;
