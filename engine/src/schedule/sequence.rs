//! A sequence: the tokens of a request, and the resources that it holds.

use crate::kv_cache::{Fetch, PagePool, Prefix};
use std::cmp::Reverse;

/// A sequence to schedule.
#[derive(Debug)]
pub(crate) struct NewSequence<T> {
    /// Its prompt; at least one token.
    pub(crate) prompt: Vec<i32>,
    /// The number of tokens to sample, at least one. The scheduler's pages must hold the prompt and all of these but the last.
    pub(crate) limit: usize,
    /// Sequences of higher priority go first.
    pub(crate) priority: i32,
    /// Whether the host has to see each token before the next can be sampled.
    pub(crate) waits_for_host: bool,
    /// Whether it may reuse pages that other sequences have filled with the same tokens.
    pub(crate) reuses_prefix: bool,
    /// The root of its prefix: it may share pages with sequences of the same root only.
    pub(crate) root: Prefix,
    /// Whether [`Sequence::resume`] may discard its sampled tokens. Its pages are then identified by its prompt only.
    pub(crate) provisional: bool,
    /// The caller's own data.
    pub(crate) item: T,
}

/// Identifies a sequence. Keys are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SequenceKey {
    pub(super) index: u32,
    pub(super) arrival: u64,
}

/// The order of sequences: the first runs first, the last is pre-empted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Order {
    priority: Reverse<i32>,
    pub(super) arrival: u64,
}

impl Order {
    /// After every sequence.
    pub(super) const LAST: Self = Self { priority: Reverse(i32::MIN), arrival: u64::MAX };

    /// A sort key of the priority alone, the highest first.
    pub(super) fn priority(self) -> Reverse<i32> {
        self.priority
    }

    /// Whether this is of higher priority than another, and not just earlier.
    pub(super) fn outranks(self, other: Self) -> bool {
        self.priority < other.priority
    }
}

/// Whether a sequence has a row of the request table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SequenceState {
    Waiting,
    Running,
}

/// What is known of pages of a sequence that are in the store of pages and not on the device.
#[derive(Debug)]
pub(super) enum StoredPrefix {
    /// The store has not been asked.
    Unknown,
    /// Pages are on their way to the host, the first of them after this many tokens.
    Fetching(usize, Fetch),
    /// There are no more.
    Exhausted,
}

/// A sequence that has not ended.
#[derive(Debug)]
pub(crate) struct Sequence<T> {
    /// The caller's own data.
    pub(crate) item: T,
    /// The prompt, followed by the sampled tokens that the host has read.
    pub(crate) tokens: Vec<i32>,
    /// The number of prompt tokens.
    pub(crate) prompt: usize,
    /// The number of tokens whose keys and values are in the sequence's pages. Steps in flight count as done, and their drafts as
    /// accepted.
    pub(crate) computed: usize,
    /// Proposed tokens that follow the tokens the host has read. They enter a step only when no sampled token is in flight, and
    /// stay here until that step's tokens are read.
    pub(crate) draft: Vec<i32>,
    /// Sampled tokens in flight; those of a draft count as one.
    pub(crate) unread: usize,
    /// The pages that it holds, in order.
    pub(crate) pages: Vec<i32>,
    /// Its row of the request table, if it runs.
    pub(crate) slot: usize,
    /// Whether it shares pages with tokens that it did not compute itself.
    pub(crate) shares_pages: bool,
    /// The number of prompt tokens whose keys and values were in the prefix cache when it started.
    pub(crate) reused: usize,
    /// Its priority.
    pub(crate) priority: i32,
    pub(super) limit: usize,
    pub(super) arrival: u64,
    /// See [`NewSequence::waits_for_host`].
    pub(super) waits_for_host: bool,
    /// See [`NewSequence::reuses_prefix`].
    pub(super) reuses_prefix: bool,
    /// See [`NewSequence::provisional`].
    pub(super) provisional: bool,
    pub(super) state: SequenceState,
    /// Whether the request table has its last token.
    pub(super) device_has_last_token: bool,
    /// Whether it has ever run.
    pub(super) was_started: bool,
    /// The number of the last step in which it had tokens.
    pub(super) last_step: u64,
    /// The number of its pages that have an identity, and the identity of the last of these.
    pub(super) identified: usize,
    pub(super) prefix: Prefix,
    pub(super) stored: StoredPrefix,
    /// See [`NewSequence::root`].
    root: Prefix,
    /// Its pages in host memory while it is swapped out.
    pub(super) host_pages: Vec<u32>,
}

impl<T> Sequence<T> {
    pub(super) fn new(new: NewSequence<T>, arrival: u64) -> Self {
        let NewSequence { prompt, limit, priority, waits_for_host, reuses_prefix, root, provisional, item } =
            new;
        Self {
            item,
            prompt: prompt.len(),
            tokens: prompt,
            computed: 0,
            draft: Vec::new(),
            unread: 0,
            pages: Vec::new(),
            slot: 0,
            shares_pages: false,
            reused: 0,
            priority,
            limit,
            arrival,
            waits_for_host,
            reuses_prefix,
            provisional,
            state: SequenceState::Waiting,
            device_has_last_token: false,
            was_started: false,
            last_step: 0,
            identified: 0,
            root,
            prefix: root,
            stored: StoredPrefix::Unknown,
            host_pages: Vec::new(),
        }
    }

    /// The number of generated tokens that the host has read.
    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Whether it has ever run.
    pub(crate) fn has_started(&self) -> bool {
        self.was_started
    }

    /// Whether it has a row of the request table.
    pub(crate) fn runs(&self) -> bool {
        self.state == SequenceState::Running
    }

    /// The number of tokens that it may still sample.
    pub(crate) fn remaining(&self) -> usize {
        (self.limit - self.generated()).saturating_sub(self.unread)
    }

    /// Whether the host has to read tokens in flight before its next step.
    pub(super) fn waits_for_host(&self) -> bool {
        self.unread > 0 && (self.waits_for_host || !self.draft.is_empty())
    }

    /// Whether its last token is the only one left to compute, and the device has that token.
    pub(super) fn is_generating(&self) -> bool {
        self.device_has_last_token && self.computed + 1 == self.tokens.len() + self.unread
    }

    /// Whether it has more tokens to compute than the one that it samples from.
    pub(super) fn has_prompt_left(&self) -> bool {
        !self.is_generating() && self.unprocessed() != 1
    }

    /// The number of tokens known to the host that are still to be computed.
    pub(super) fn unprocessed(&self) -> usize {
        self.tokens.len().saturating_sub(self.computed)
    }

    /// Continues a provisional sequence after `tokens`, which begin with its prompt, to sample up to `limit` more. None of its
    /// steps may be in flight. The computed prefix that agrees with `tokens` is kept; the rest is overwritten.
    pub(crate) fn resume(&mut self, tokens: &[i32], limit: usize) {
        let (sampled, actual) = (self.tokens.iter().skip(self.prompt), tokens.iter().skip(self.prompt));
        let same =
            self.prompt + sampled.zip(actual).take_while(|(sampled, actual)| sampled == actual).count();
        self.tokens.truncate(same);
        self.tokens.extend(tokens.iter().skip(same));
        (self.prompt, self.limit) = (self.tokens.len(), limit);
        // The last token is always computed again, because its logits are needed; the host sends it.
        self.computed = self.computed.min(same).min(self.prompt.saturating_sub(1));
        self.device_has_last_token = false;
    }

    /// Whether its next page may be one that is already filled: all pages that it holds are full and identified, and it is not the
    /// page of the last token.
    pub(super) fn may_reuse(&self, block_size: usize) -> bool {
        self.reuses_prefix
            && self.host_pages.is_empty()
            && self.computed == self.identified * block_size
            && self.pages.len() == self.identified
            && self.computed + block_size < self.tokens.len()
    }

    /// The number of pages it still needs for its tokens.
    pub(super) fn missing_pages(&self, block_size: usize) -> usize {
        let held = self.pages.len() + self.host_pages.len();
        (self.tokens.len() + self.unread).div_ceil(block_size).saturating_sub(held)
    }

    pub(super) fn order(&self) -> Order {
        Order { priority: Reverse(self.priority), arrival: self.arrival }
    }

    /// Releases its pages, whose tokens then have to be recomputed.
    pub(super) fn restart(&mut self, pages: &mut PagePool) {
        pages.release(self.pages.drain(..));
        (self.computed, self.identified, self.prefix) = (0, 0, self.root);
        self.shares_pages = false;
    }

    /// Same as [`Self::restart`], unless its pages are in host memory.
    pub(super) fn restart_unless_swapped(&mut self, pages: &mut PagePool) {
        if self.host_pages.is_empty() {
            self.restart(pages);
        }
    }
}
