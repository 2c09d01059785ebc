//! The pages of the KV cache: which sequences hold each page, and which prefix a page keeps for later requests.
//!
//! Any number of sequences can hold a page. A page that is full of tokens gets an identity: the page before it and the tokens in
//! it. So equal identities are equal prefixes, compared by their tokens and not just by a hash. A page without holders keeps its
//! prefix until the page is needed; the least recently used page is evicted first.
//!
//! Sequences never write to a full page, so a shared page never changes and is never copied. Work is enqueued in order on one
//! stream, so a released page can be handed out at once: steps in flight write to it before any step that is launched later.

use super::page_key::PageKey;
use std::{
    collections::{HashMap, hash_map::RandomState},
    hash::BuildHasher,
};

/// The identity of a page: it stands for the tokens of the page and all tokens before them. Identities are never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Prefix {
    id: u64,
    /// What the store of pages knows it by, if there is a store.
    key: Option<PageKey>,
}

impl Prefix {
    /// The identity of the empty prefix of requests without a salt.
    pub(crate) const EMPTY: Self = Self { id: 0, key: None };

    /// The bit that marks the root prefix of a salted request; identities of pages are counted from 1.
    const SALTED: u64 = 1 << 63;

    /// What the store of pages knows the prefix by, if there is a store.
    pub(crate) fn key(&self) -> Option<PageKey> {
        self.key
    }
}

/// The end of a linked list of pages.
const NONE: u32 = u32::MAX;

/// All pages of the KV cache. Page numbers are those that the device uses.
#[derive(Debug)]
pub(crate) struct PagePool {
    block_size: usize,
    pages: Vec<Page>,
    /// The tokens of each page that has an identity, page after page.
    tokens: Vec<i32>,
    /// Pages without holders and without a prefix.
    free: Vec<u32>,
    /// The list of cached pages (no holders, but an identity): its least and its most recently used page.
    oldest: u32,
    newest: u32,
    cached: usize,
    /// Pages by the hash of their identity. If two hashes collide, only one of the pages is found.
    index: HashMap<u64, u32>,
    hasher: RandomState,
    next: u64,
    keep: bool,
    /// The key of the empty prefix in the store of pages, if there is a store.
    model: Option<PageKey>,
    /// Pages that got an identity, and pages that lost it, since they were last taken; only if there is a store.
    filled: Vec<(i32, PageKey)>,
    evicted: Vec<(i32, PageKey)>,
}

#[derive(Clone, Debug)]
struct Page {
    holders: u32,
    /// The page's identity ([`Prefix::EMPTY`] if it has none), the identity of the page before it, and the hash of the identity.
    prefix: Prefix,
    follows: Prefix,
    hash: u64,
    /// The neighbours in the list of cached pages.
    older: u32,
    newer: u32,
}

impl PagePool {
    /// A pool of `total` free pages. `keep` says whether pages keep their prefixes for later requests, `model` is the key of the empty
    /// prefix in the store of pages, if there is a store.
    pub(crate) fn new(total: usize, block_size: usize, keep: bool, model: Option<PageKey>) -> Self {
        let total = total.min(i32::MAX as usize);
        let page = Page {
            holders: 0,
            prefix: Prefix::EMPTY,
            follows: Prefix::EMPTY,
            hash: 0,
            older: NONE,
            newer: NONE,
        };
        Self {
            block_size,
            pages: vec![page; total],
            tokens: if keep { vec![0; total * block_size] } else { Vec::new() },
            // Pages are popped from the end, so low page numbers are handed out first.
            free: (0..total as u32).rev().collect(),
            oldest: NONE,
            newest: NONE,
            cached: 0,
            index: HashMap::new(),
            hasher: RandomState::new(),
            next: 1,
            keep,
            model,
            filled: Vec::new(),
            evicted: Vec::new(),
        }
    }

    /// The root prefix for a salt, or for no salt. Requests with different roots never share pages. A client cannot choose salts
    /// that collide, because the hash key is random.
    pub(crate) fn root(&self, salt: Option<&str>) -> Prefix {
        let id = salt.map_or(0, |salt| self.hasher.hash_one(salt) | Prefix::SALTED);
        let key = self.model.map(|model| salt.map_or(model, |salt| model.salted(salt)));
        Prefix { id, key }
    }

    /// The number of pages.
    pub(crate) fn total(&self) -> usize {
        self.pages.len()
    }

    /// The number of pages that can be taken: free pages, and cached pages, which then lose their prefix.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.cached
    }

    /// Pages that keep a prefix and have no holders.
    pub(crate) fn cached(&self) -> usize {
        self.cached
    }

    /// Pages that have holders.
    pub(crate) fn in_use(&self) -> usize {
        self.total() - self.available()
    }

    /// Takes a page. If no page is free, the least recently used cached page loses its prefix.
    pub(crate) fn take(&mut self) -> Option<i32> {
        let page = match self.free.pop() {
            Some(page) => page,
            None => {
                let page = self.oldest;
                if page == NONE {
                    return None;
                }
                self.unlink(page);
                if let Some(key) = self.forget(page).key {
                    self.evicted.push((page as i32, key));
                }
                page
            }
        };
        self.pages[page as usize].holders = 1;
        Some(page as i32)
    }

    /// Takes `count` pages, or no page if fewer are available.
    pub(crate) fn take_many(&mut self, count: usize) -> Option<Vec<i32>> {
        if count > self.available() {
            return None;
        }
        (0..count).map(|_| self.take()).collect()
    }

    /// Releases a sequence's pages, given in their order. Shared pages stay with their other holders.
    pub(crate) fn release(&mut self, pages: impl DoubleEndedIterator<Item = i32>) {
        // The last page first: a page is useless without the pages before it, so it must be evicted before them.
        for page in pages.rev() {
            let page = page as u32;
            let entry = &mut self.pages[page as usize];
            debug_assert!(entry.holders > 0, "page {page} is released more often than it was taken");
            entry.holders -= 1;
            if entry.holders > 0 {
                continue;
            }
            if entry.prefix == Prefix::EMPTY {
                self.free.push(page);
            } else {
                self.link(page);
            }
        }
    }

    /// Finds the cached page with these tokens after the prefix `follows`, and adds a holder to it.
    pub(crate) fn share(&mut self, follows: Prefix, tokens: &[i32]) -> Option<(i32, Prefix)> {
        let (page, prefix) = self.find(follows, tokens)?;
        if self.pages[page as usize].holders == 0 {
            self.unlink(page);
        }
        self.pages[page as usize].holders += 1;
        Some((page as i32, prefix))
    }

    /// Gives a full page the identity of its tokens after the prefix `follows`. If another page has the same tokens and prefix,
    /// its identity is returned.
    pub(crate) fn identify(&mut self, page: i32, follows: Prefix, tokens: &[i32]) -> Prefix {
        let before = self.next;
        let prefix = self.identify_stored(page, follows, tokens);
        if let (true, Some(key)) = (self.next > before, prefix.key) {
            self.filled.push((page, key));
        }
        prefix
    }

    /// Same as [`Self::identify`], for a page that comes from the store.
    pub(crate) fn identify_stored(&mut self, page: i32, follows: Prefix, tokens: &[i32]) -> Prefix {
        if !self.keep {
            return Prefix::EMPTY;
        }
        if let Some((_, prefix)) = self.find(follows, tokens) {
            return prefix;
        }
        let hash = self.hash(follows, tokens);
        let prefix = Prefix { id: self.next, key: follows.key.map(|key| key.after(tokens)) };
        self.next += 1;
        let page = page as u32;
        self.index.entry(hash).or_insert_with(|| {
            let entry = &mut self.pages[page as usize];
            debug_assert!(entry.prefix == Prefix::EMPTY && entry.holders > 0);
            (entry.prefix, entry.follows, entry.hash) = (prefix, follows, hash);
            let start = page as usize * self.block_size;
            self.tokens[start..start + self.block_size].copy_from_slice(tokens);
            page
        });
        prefix
    }

    /// Takes the pages that got an identity since the last call. They are full once the steps planned so far have run.
    pub(crate) fn take_filled(&mut self) -> Vec<(i32, PageKey)> {
        std::mem::take(&mut self.filled)
    }

    /// Takes the pages that lost their identity since the last call. Whoever took them has not written to them yet.
    pub(crate) fn take_evicted(&mut self) -> Vec<(i32, PageKey)> {
        std::mem::take(&mut self.evicted)
    }

    fn hash(&self, follows: Prefix, tokens: &[i32]) -> u64 {
        self.hasher.hash_one((follows.id, tokens))
    }

    fn find(&self, follows: Prefix, tokens: &[i32]) -> Option<(u32, Prefix)> {
        if !self.keep || tokens.len() != self.block_size {
            return None;
        }
        let page = *self.index.get(&self.hash(follows, tokens))?;
        let start = page as usize * self.block_size;
        let entry = &self.pages[page as usize];
        let same = entry.follows == follows && self.tokens[start..start + self.block_size] == *tokens;
        same.then_some((page, entry.prefix))
    }

    /// Removes the identity of a page, and returns it.
    fn forget(&mut self, page: u32) -> Prefix {
        let entry = &mut self.pages[page as usize];
        self.index.remove(&entry.hash);
        std::mem::take(&mut entry.prefix)
    }

    /// Appends a page to the list of cached pages.
    fn link(&mut self, page: u32) {
        let newest = self.newest;
        let entry = &mut self.pages[page as usize];
        (entry.older, entry.newer) = (newest, NONE);
        match newest {
            NONE => self.oldest = page,
            newest => self.pages[newest as usize].newer = page,
        }
        self.newest = page;
        self.cached += 1;
    }

    /// Removes a page from the list of cached pages.
    fn unlink(&mut self, page: u32) {
        let Page { older, newer, .. } = self.pages[page as usize];
        match older {
            NONE => self.oldest = newer,
            older => self.pages[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.pages[newer as usize].older = older,
        }
        self.cached -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCK: usize = 2;

    /// Holds a sequence of blocks: shares the pages that are cached, takes and identifies the rest.
    fn hold(pool: &mut PagePool, blocks: &[[i32; BLOCK]]) -> Option<(Vec<i32>, usize)> {
        let (mut pages, mut follows, mut shared) = (Vec::new(), Prefix::EMPTY, 0);
        for tokens in blocks {
            let found = if shared == pages.len() { pool.share(follows, tokens) } else { None };
            let (page, prefix) = match found {
                Some(found) => {
                    shared += 1;
                    found
                }
                None => {
                    let Some(page) = pool.take() else {
                        pool.release(pages.into_iter());
                        return None;
                    };
                    (page, pool.identify(page, follows, tokens))
                }
            };
            pages.push(page);
            follows = prefix;
        }
        Some((pages, shared))
    }

    #[test]
    fn a_prefix_is_found_until_its_pages_are_needed_and_its_end_is_evicted_first() {
        let mut pool = PagePool::new(4, BLOCK, true, None);
        let (a, shared) = hold(&mut pool, &[[1, 2], [3, 4], [5, 6]]).unwrap();
        assert_eq!((shared, pool.in_use()), (0, 3));
        let (b, shared) = hold(&mut pool, &[[1, 2], [3, 4]]).unwrap();
        assert_eq!((shared, &b[..], pool.in_use()), (2, &a[..2], 3));
        pool.release(a.iter().copied());
        assert_eq!((pool.in_use(), pool.cached(), pool.available()), (2, 1, 2));
        pool.release(b.into_iter());
        assert_eq!((pool.in_use(), pool.cached()), (0, 3));
        // Two pages for others: one was free, the other one is that of [5, 6].
        let others = pool.take_many(2).unwrap();
        assert_eq!(others[1], a[2]);
        assert_eq!(hold(&mut pool, &[[1, 2], [3, 4]]).unwrap(), (a[..2].to_vec(), 2));
        assert!(pool.take().is_none());
    }

    #[test]
    fn equal_tokens_after_different_prefixes_are_different() {
        let mut pool = PagePool::new(8, BLOCK, true, None);
        hold(&mut pool, &[[1, 2], [9, 9]]).unwrap();
        assert_eq!(hold(&mut pool, &[[3, 4], [9, 9]]).unwrap().1, 0);
        assert_eq!(hold(&mut pool, &[[9, 9]]).unwrap().1, 0);
    }

    #[test]
    fn no_prefix_is_kept_if_prefixes_are_off() {
        let mut pool = PagePool::new(4, BLOCK, false, None);
        let (pages, _) = hold(&mut pool, &[[1, 2], [3, 4]]).unwrap();
        pool.release(pages.into_iter());
        assert_eq!((pool.cached(), hold(&mut pool, &[[1, 2]]).unwrap().1), (0, 0));
    }

    proptest! {
        #[test]
        fn pages_are_shared_by_equal_prefixes_only_and_no_page_is_lost(
            total in 1usize..12,
            steps in prop::collection::vec((prop::collection::vec(0i32..2, 1..5), any::<prop::sample::Index>(), any::<bool>()), 1..80),
        ) {
            let mut pool = PagePool::new(total, BLOCK, true, None);
            let mut held: Vec<(Vec<i32>, Vec<[i32; BLOCK]>)> = Vec::new();
            for (tokens, which, release) in steps {
                if release && !held.is_empty() {
                    let (pages, _) = held.swap_remove(which.index(held.len()));
                    pool.release(pages.into_iter());
                } else {
                    let blocks: Vec<[i32; BLOCK]> = tokens.iter().map(|token| [*token; BLOCK]).collect();
                    if let Some((pages, _)) = hold(&mut pool, &blocks) {
                        held.push((pages, blocks));
                    }
                }
                // All holders of a page have the same tokens in it and before it.
                let mut content: HashMap<i32, &[[i32; BLOCK]]> = HashMap::new();
                for (pages, blocks) in &held {
                    for (index, page) in pages.iter().enumerate() {
                        let prefix = &blocks[..=index];
                        prop_assert_eq!(*content.entry(*page).or_insert(prefix), prefix);
                    }
                }
                prop_assert_eq!(content.len(), pool.in_use());
                prop_assert_eq!(pool.in_use() + pool.available(), total);
            }
            for (pages, _) in held {
                pool.release(pages.into_iter());
            }
            prop_assert_eq!((pool.in_use(), pool.available()), (0, total));
            prop_assert_eq!(pool.take_many(total).map(|pages| pages.len()), Some(total));
        }
    }
}
