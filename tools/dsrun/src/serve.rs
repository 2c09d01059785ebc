//! The OpenAI-compatible server: a thin layer over the engine's [`Handle`](dsrun_engine::service::Handle).
//!
//! | module | holds |
//! |---|---|
//! | `settings` | the options: flags and file |
//! | `server` | the server from its start to its end |
//! | `connections` | accepting connections, and time limits on slow clients |
//! | `routes` | paths and their handlers |
//! | `app` | state that requests share |
//! | `access`, `origins`, `access_log` | API keys and rate limits; hosts and origins that are served; ids and log of requests |
//! | `intake`, `body`, `error` | bounds on work for requests before they are accepted, reading requests, error responses |
//! | `endpoint`, `generation` | the path of a completion from its request to its answer, which both kinds share |
//! | `chat`, `completions` | the two kinds of completion: how a request is read and an answer written |
//! | `messages`, `responses`, `response_store` | the APIs of Anthropic and OpenAI's Responses, and the conversations that it stores |
//! | `embeddings` | `/v1/embeddings` |
//! | `rerank` | `/v1/rerank`, `/v1/score` |
//! | `prompts`, `text`, `events` | text to tokens, tokens to text, text to server-sent events |
//! | `replicas`, `supervisor` | several engines with the same model; what rebuilds those that fail |
//! | `forms`, `grammar`, `tools`, `reasoning` | the form of an answer, structured output, tool calls, reasoning |
//! | `traces` | traces of requests for an OpenTelemetry collector |
//! | `budget`, `unsent`, `heap` | bounds on bytes that are held together, on responses that clients do not read; memory after load |
//! | `metrics`, `openapi`, `page` | `/metrics`, `/openapi.json`, the web page |

mod access;
mod access_log;
mod api;
mod app;
mod body;
mod budget;
mod chat;
mod completions;
mod connections;
mod embeddings;
mod endpoint;
mod error;
mod events;
mod forms;
mod generation;
mod grammar;
mod heap;
mod intake;
mod messages;
mod metrics;
mod openapi;
mod origins;
mod page;
mod prompts;
mod reasoning;
mod replicas;
mod rerank;
mod response_store;
mod responses;
mod routes;
mod server;
mod supervisor;
mod text;
mod tools;
mod traces;
mod unsent;

#[cfg(test)]
mod tests;

pub(crate) use app::Loaded;
pub(crate) use replicas::Replicas;
pub(crate) use server::{Server, app};
pub(crate) use supervisor::Supervisor;
