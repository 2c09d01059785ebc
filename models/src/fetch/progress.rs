//! How a fetch tells its caller how far it has come.

/// Receives the progress of long steps: waiting, downloading, unpacking.
///
/// The library never prints; whoever calls it draws a bar, logs, or ignores the calls (as [`Silent`] does).
/// Steps do not nest: every [`begin`](Self::begin) is followed by one [`end`](Self::end), also when the step
/// fails.
pub trait Progress {
    /// A step starts. `what` is a short phrase for people; `total_bytes` is absent when the size is unknown.
    fn begin(&mut self, what: &str, total_bytes: Option<u64>);
    /// The step has handled this many bytes since it began. The figure may fall when a download starts over.
    fn advance(&mut self, bytes_so_far: u64);
    /// The step is over, well or not.
    fn end(&mut self);
}

/// Progress that nobody watches.
#[derive(Debug, Default, Clone, Copy)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&mut self, _what: &str, _total_bytes: Option<u64>) {}
    fn advance(&mut self, _bytes_so_far: u64) {}
    fn end(&mut self) {}
}

/// Runs `step` between `begin` and `end`, so that an early return cannot leave a bar hanging.
pub(crate) fn during<T>(
    progress: &mut dyn Progress,
    what: &str,
    total_bytes: Option<u64>,
    step: impl FnOnce(&mut dyn Progress) -> T,
) -> T {
    progress.begin(what, total_bytes);
    let outcome = step(progress);
    progress.end();
    outcome
}
