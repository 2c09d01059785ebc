//! Lets a table skip cases that take long to make. With the id of a case, the table asks [`is_wanted`] before it makes the case. All are
//! wanted unless [`only`] asks for one case, or [`ids`] for ids alone. A table that never asks makes all its cases.

use std::cell::RefCell;

enum Wanted {
    All,
    /// The case with this id.
    One(String),
    /// Only those with variants. The ids of the others are collected here.
    Ids(Vec<String>),
}

thread_local! {
    static WANTED: RefCell<Wanted> = const { RefCell::new(Wanted::All) };
}

fn with<T>(wanted: Wanted, make: impl FnOnce() -> T) -> (T, Wanted) {
    let before = WANTED.replace(wanted);
    let made = make();
    (made, WANTED.replace(before))
}

/// Runs `make` with one wanted case, the one with this id. Others may be made, too.
pub(crate) fn only<T>(id: &str, make: impl FnOnce() -> T) -> T {
    with(Wanted::One(id.to_owned()), make).0
}

/// Runs `make` with no wanted cases but those that have variants. Returns its result, and the ids of the cases that it skipped.
pub(crate) fn ids<T>(make: impl FnOnce() -> T) -> (T, Vec<String>) {
    let (made, wanted) = with(Wanted::Ids(Vec::new()), make);
    (made, if let Wanted::Ids(ids) = wanted { ids } else { Vec::new() })
}

/// Whether a case has to be made.
pub(super) fn is_wanted(id: &str) -> bool {
    WANTED.with_borrow_mut(|wanted| match wanted {
        Wanted::All => true,
        // The id of a variant begins with that of its case.
        Wanted::One(wanted) => wanted.starts_with(id),
        // Cases with extents have variants, which depend on their operands.
        Wanted::Ids(_) if id.ends_with("extent") || id.ends_with("extents") => true,
        Wanted::Ids(ids) => {
            ids.push(id.to_owned());
            false
        }
    })
}
