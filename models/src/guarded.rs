//! Runs libraries that panic on some contradictions of a file instead of reporting them.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread is caught here.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs a call; `None` if it panics. Nothing is printed then: the caller has an error for the file that is to blame.
pub(crate) fn guarded<T>(call: impl FnOnce() -> T) -> Option<T> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                report(panic);
            }
        }));
    });
    let before = GUARDED.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(call));
    GUARDED.set(before);
    result.ok()
}

#[cfg(test)]
mod tests {
    use super::guarded;

    #[test]
    fn panics_are_caught_at_any_depth() {
        assert_eq!(guarded(|| 1), Some(1));
        let inner = guarded(|| guarded(|| -> u8 { panic!("inside") }).is_none());
        assert_eq!(inner, Some(true));
        assert_eq!(guarded(|| -> u8 { panic!("outside") }), None);
    }
}
