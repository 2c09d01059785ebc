//! Which cases of a table are made: all, or one that is asked for by its id, or those whose ids are not known before. Some take long to
//! make, so tables ask before they do.

use std::cell::RefCell;

enum Wanted {
    All,
    /// The case with this id.
    One(String),
    /// None, where the id says all. These are the ids of those that were left out.
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

/// Has the tables that `make` asks leave out cases that take long to make, except for the one with this id.
pub(crate) fn only<T>(id: &str, make: impl FnOnce() -> T) -> T {
    with(Wanted::One(id.to_owned()), make).0
}

/// Has the tables that `make` asks leave out cases that take long to make, and returns the ids of those.
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
