//! A record of launched steps, for drawing timelines.

/// A step that was launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LaunchedStep {
    /// Its tokens.
    pub tokens: usize,
    /// Its sequences.
    pub sequences: usize,
    /// The number of steps that were complete, with their tokens read by the host, at the launch.
    pub completed: usize,
}
