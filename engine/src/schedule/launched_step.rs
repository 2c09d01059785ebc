//! A record of the steps that were launched, by which timelines are drawn.

/// A step that was launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LaunchedStep {
    /// Its tokens.
    pub tokens: usize,
    /// Its sequences.
    pub sequences: usize,
    /// The number of steps whose tokens the host had read before: the steps before that one were complete.
    pub completed: usize,
}
