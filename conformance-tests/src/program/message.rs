//! What parent and child say to each other: a line of JSON each, over the child's standard input and output.
//!
//! A plugin may write to standard output too. So a child's line begins with a line break and [`MARK`]; what else comes is not
//! for the parent, and is kept like the child's standard error.

use super::{backend::Identity, record::Record};
use serde::{Deserialize, Serialize};

/// In front of what a child says.
pub(crate) const MARK: &str = "@dsrun-conformance ";

/// What a parent asks for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Request {
    /// All cases of a group, but for some.
    Group { name: String, seed: u64, drawn: usize, skip: Vec<String> },
    /// One case.
    Case { id: String },
}

/// What a child tells.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Event {
    /// The backend is open. The first thing a child tells.
    Ready(Identity),
    /// The backend cannot be opened, for this reason. The first and last thing.
    Unusable(String),
    /// A case begins: what follows is its doing. With the choices that made it, if it was drawn.
    Begin { id: String, choices: Option<Vec<usize>> },
    /// A case has ended.
    End(Box<Record>),
    /// What was asked for is done.
    Done,
    /// There is no case of the id that was asked for.
    Unknown,
    /// The device is lost: another child has to go on.
    Lost,
}
