//! Pages of the KV cache: who has which.

/// Hands out pages. Page numbers are the device's.
#[derive(Debug)]
pub(crate) struct PageAllocator {
    free: Vec<i32>,
    total: usize,
}

impl PageAllocator {
    /// `total` pages, all free.
    pub(crate) fn new(total: usize) -> Self {
        // Highest first, so that the lowest are handed out first.
        let free = (0..i32::try_from(total).unwrap_or(i32::MAX)).rev().collect();
        Self { free, total }
    }

    /// Pages that are free.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Pages there are.
    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// Takes `count` pages, or none at all if there are fewer.
    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<i32>> {
        let start = self.free.len().checked_sub(count)?;
        let mut pages = self.free.split_off(start);
        pages.reverse();
        Some(pages)
    }

    /// Gives pages back.
    pub(crate) fn give(&mut self, pages: impl IntoIterator<Item = i32>) {
        self.free.extend(pages);
        debug_assert!(self.free.len() <= self.total, "more pages given back than there are");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        #[test]
        fn no_page_is_handed_out_twice_and_none_is_lost(
            total in 0usize..40,
            steps in prop::collection::vec((any::<bool>(), 0usize..12), 0..60),
        ) {
            let mut pages = PageAllocator::new(total);
            let mut held: Vec<Vec<i32>> = Vec::new();
            for (take, count) in steps {
                if take {
                    let free = pages.free();
                    match pages.take(count) {
                        Some(taken) => { prop_assert_eq!(taken.len(), count); held.push(taken); }
                        None => { prop_assert!(count > free); prop_assert_eq!(pages.free(), free); }
                    }
                } else if !held.is_empty() {
                    pages.give(held.swap_remove(count % held.len()));
                }
                let taken: Vec<i32> = held.iter().flatten().copied().collect();
                let distinct: HashSet<i32> = taken.iter().copied().collect();
                prop_assert_eq!(distinct.len(), taken.len());
                prop_assert!(taken.iter().all(|page| (0..total as i32).contains(page)));
                prop_assert_eq!(taken.len() + pages.free(), pages.total());
            }
        }
    }
}
