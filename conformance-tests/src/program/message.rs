//! The messages between parent and worker: lines of JSON on the worker's standard input and output.
//!
//! A plugin that writes to standard output breaks a rule, but not the protocol: each event begins with a line break and [`MARK`]; all other output is
//! treated like the worker's standard error.

use super::{backend::Identity, record::Record};
use serde::{Deserialize, Serialize};

/// The prefix of every event.
pub(crate) const MARK: &str = "@dsrun-conformance ";

/// A request of the parent.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Request {
    /// Run all cases of a group except those in `skip`.
    Group { name: String, seed: u64, drawn: usize, skip: Vec<String> },
    /// Run one case.
    Case { id: String },
}

/// An event that a worker reports.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Event {
    /// The backend is open. This is the first event.
    Ready(Identity),
    /// The backend cannot be opened, for this reason. This is the only event.
    Unusable(String),
    /// A case begins, whose tensors have so many elements; `choices` are those of a random case.
    Begin { id: String, choices: Option<Vec<usize>>, elements: usize },
    /// A case has ended.
    End(Box<Record>),
    /// The request is complete.
    Done,
    /// No case has the requested id.
    Unknown,
    /// The device no longer works; another worker has to continue.
    Lost,
}
