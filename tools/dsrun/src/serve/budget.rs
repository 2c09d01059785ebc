//! A bound on bytes that several requests hold together.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// Counts bytes that are held at a time.
#[derive(Debug)]
pub(crate) struct Budget {
    held: AtomicUsize,
    most: usize,
}

/// Bytes that are counted until this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Budget {
    /// A budget of `most` bytes.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { held: AtomicUsize::new(0), most })
    }

    /// The bytes that are held now.
    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Holds no bytes yet.
    pub(super) fn start(self: &Arc<Self>) -> Held {
        Held { budget: self.clone(), bytes: 0 }
    }

    /// Holds bytes; `None` if that makes more than the budget. If nothing is held, any number of bytes is allowed.
    pub(super) fn hold(self: &Arc<Self>, bytes: usize) -> Option<Held> {
        let room = |held: usize| {
            let sum = held.saturating_add(bytes);
            (held == 0 || sum <= self.most).then_some(sum)
        };
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).ok()?;
        Some(Held { budget: self.clone(), bytes })
    }
}

impl Held {
    /// Holds more bytes. Returns whether the budget has room for them.
    pub(super) fn add(&mut self, bytes: usize) -> bool {
        let Some(mut more) = self.budget.hold(bytes) else { return false };
        self.bytes += std::mem::take(&mut more.bytes);
        true
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_beyond_the_budget_are_not_held() {
        let budget = Budget::new(10);
        let first = budget.hold(7).expect("there is room");
        assert!(budget.hold(4).is_none());
        let second = budget.hold(3).expect("there is room");
        assert_eq!(budget.held(), 10);
        drop((first, second));
        let large = budget.hold(100).expect("nothing else is held");
        assert!(budget.hold(1).is_none());
        drop(large);
        let mut growing = budget.start();
        assert!(growing.add(6) && growing.add(4) && !growing.add(1));
        assert_eq!(budget.held(), 10);
        drop(growing);
        assert_eq!(budget.held(), 0);
    }
}
