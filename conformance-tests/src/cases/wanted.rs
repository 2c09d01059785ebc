//! Which cases of a table are made: all, or one that is asked for by its id, because some take long to make.

use std::cell::RefCell;

thread_local! {
    /// The id of the one case that is asked for; empty for all.
    static WANTED: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Has the tables that `make` asks leave out cases that take long to make, except for the one with this id.
pub(crate) fn only<T>(id: &str, make: impl FnOnce() -> T) -> T {
    let before = WANTED.replace(id.to_owned());
    let made = make();
    WANTED.replace(before);
    made
}

/// Whether a case has to be made: all do outside of [`only`]. The id of a variant begins with that of its case.
pub(super) fn is_wanted(id: &str) -> bool {
    WANTED.with_borrow(|wanted| wanted.is_empty() || wanted.starts_with(id))
}
