//! Pages that have left the device and stay in host memory, up to a limit; the least recently used page goes first.

use super::page_key::PageKey;
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

/// The keys and values of a page in all layers, one cache after the other.
pub(crate) type PageBytes = Arc<Vec<u8>>;

/// Pages in host memory.
#[derive(Debug)]
pub(crate) struct HostTier {
    limit: u64,
    used: u64,
    /// Each page, with the time of its last use.
    pages: HashMap<PageKey, (PageBytes, u64)>,
    /// Pages by the time of their last use.
    order: BTreeMap<u64, PageKey>,
    time: u64,
}

impl HostTier {
    /// A tier of at most `limit` bytes.
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, used: 0, pages: HashMap::new(), order: BTreeMap::new(), time: 0 }
    }

    /// Whether it can hold any page.
    pub(crate) fn is_on(&self) -> bool {
        self.limit > 0
    }

    /// Bytes of its pages.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Whether it holds a page.
    pub(crate) fn has(&self, key: &PageKey) -> bool {
        self.pages.contains_key(key)
    }

    /// A page.
    pub(crate) fn get(&self, key: &PageKey) -> Option<PageBytes> {
        self.pages.get(key).map(|(bytes, _)| bytes.clone())
    }

    /// Says that a page was used.
    pub(crate) fn touch(&mut self, key: &PageKey) {
        if let Some((_, used)) = self.pages.get_mut(key) {
            self.order.remove(used);
            self.time += 1;
            *used = self.time;
            self.order.insert(self.time, *key);
        }
    }

    /// Adds a page, and drops the least recently used pages if there are too many.
    pub(crate) fn insert(&mut self, key: PageKey, bytes: PageBytes) {
        if self.has(&key) {
            return self.touch(&key);
        }
        self.used += bytes.len() as u64;
        self.time += 1;
        self.pages.insert(key, (bytes, self.time));
        self.order.insert(self.time, key);
        while self.used > self.limit
            && let Some((_, oldest)) = self.order.pop_first()
        {
            if let Some((bytes, _)) = self.pages.remove(&oldest) {
                self.used -= bytes.len() as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_page_is_dropped_first() {
        let keys = [1, 2, 3].map(|token| PageKey::root([0; 32]).after(&[token]));
        let mut tier = HostTier::new(25);
        for key in keys {
            tier.insert(key, Arc::new(vec![0; 10]));
            tier.touch(&keys[0]);
        }
        assert_eq!(keys.map(|key| tier.has(&key)), [true, false, true]);
        assert_eq!(tier.used(), 20);
        tier.insert(keys[1], Arc::new(vec![0; 30]));
        assert_eq!((keys.map(|key| tier.has(&key)), tier.used()), ([false; 3], 0), "it is too large");
        assert!(!HostTier::new(0).is_on());
    }
}
