//! The names of the last launches, for error messages: device errors are asynchronous and surface at later calls.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Mutex, PoisonError},
};

/// The number of names kept.
const KEPT: usize = 6;

/// Names of kernels and graphs, in the order in which they were enqueued on any stream of a handle.
#[derive(Debug, Default)]
pub(crate) struct Recent(Mutex<VecDeque<&'static str>>);

impl Recent {
    /// Records a launch.
    pub(crate) fn note(&self, name: &'static str) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if names.len() == KEPT {
            names.pop_front();
        }
        names.push_back(name);
    }
}

/// A suffix for an error message; empty if nothing was enqueued.
impl fmt::Display for Recent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if names.is_empty() {
            return Ok(());
        }
        let newest: Vec<&str> = names.iter().rev().copied().collect();
        write!(f, " (enqueued last, newest first: {})", newest.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_come_first_and_old_ones_are_forgotten() {
        let recent = Recent::default();
        assert_eq!(recent.to_string(), "");
        ["a", "b", "c", "d", "e", "f", "g"].into_iter().for_each(|name| recent.note(name));
        assert_eq!(recent.to_string(), " (enqueued last, newest first: g, f, e, d, c, b)");
    }
}
