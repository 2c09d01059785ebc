//! The OpenAI-compatible server: a thin layer over the engine's [`Handle`](dsrun_engine::service::Handle).
//!
//! | module | holds |
//! |---|---|
//! | `settings` | flags and file |
//! | `server` | listening, from the start to the end |
//! | `connections` | limits on what clients can be slow at |
//! | `routes` | what is where |
//! | `app` | what requests share |
//! | `access`, `body`, `error` | who may ask, what is read, what is refused |
//! | `chat`, `completions` | the two kinds of completion; `generation` is what they share |
//! | `embeddings` | texts as vectors |
//! | `replicas` | several engines behind one door |
//! | `text`, `events` | tokens to text, text to server-sent events |
//! | `grammar`, `tools` | answers of a given form, calls of tools |
//! | `metrics`, `openapi`, `page` | what is counted, described for programs, shown to people |

mod access;
mod api;
mod app;
mod body;
mod chat;
mod completions;
mod connections;
mod embeddings;
mod error;
mod events;
mod generation;
mod grammar;
mod metrics;
mod openapi;
mod page;
mod replicas;
mod routes;
mod server;
mod settings;
mod text;
mod tools;

#[cfg(test)]
mod tests;

pub(crate) use app::{App, Loaded};
pub(crate) use replicas::Replicas;
pub(crate) use server::{Server, app};
pub(crate) use settings::ServeSettings;
