//! Counts the memory that a device handle holds.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Counts the memory that a device handle holds, up to a limit. Backends reserve memory here before they allocate it.
#[derive(Debug)]
pub struct MemoryAccount {
    limit: Option<u64>,
    used: AtomicU64,
}

impl MemoryAccount {
    /// An account of at most `limit` bytes, if there is a limit.
    #[must_use]
    pub fn new(limit: Option<u64>) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicU64::new(0) })
    }

    /// The maximum number of bytes, if there is one.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// The number of reserved bytes.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The number of bytes left below the limit, if there is one.
    #[must_use]
    pub fn free(&self) -> Option<u64> {
        self.limit.map(|limit| limit.saturating_sub(self.used()))
    }

    /// Reserves memory until the reservation is dropped; `None` if it would exceed the limit.
    #[must_use]
    pub fn reserve(self: &Arc<Self>, bytes: usize) -> Option<MemoryReservation> {
        let bytes = bytes as u64;
        let add =
            |used: u64| used.checked_add(bytes).filter(|sum| self.limit.is_none_or(|limit| *sum <= limit));
        self.used.try_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(MemoryReservation { account: self.clone(), bytes })
    }
}

/// Memory reserved in a [`MemoryAccount`].
#[derive(Debug)]
pub struct MemoryReservation {
    account: Arc<MemoryAccount>,
    bytes: u64,
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.account.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_stay_within_the_limit() {
        let account = MemoryAccount::new(Some(3));
        let held = account.reserve(2).unwrap();
        assert!(account.reserve(2).is_none());
        assert!(account.reserve(usize::MAX).is_none());
        assert_eq!((account.used(), account.free()), (2, Some(1)));
        drop(held);
        assert!(account.reserve(3).is_some());
        assert_eq!(account.used(), 0);
    }

    #[test]
    fn without_a_limit_only_the_count_is_kept() {
        let account = MemoryAccount::new(None);
        let _held = account.reserve(7).unwrap();
        assert_eq!((account.used(), account.free()), (7, None));
    }
}
