//! A request as the scheduler sees it.

use super::{Entry, Prefix};
use crate::kv_cache::PagePool;
use std::cmp::Reverse;

/// The order of sequences: which goes first, and which has to yield.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Order {
    priority: Reverse<i32>,
    pub(super) arrival: u64,
}

impl Order {
    /// Behind all others.
    pub(super) const LAST: Self = Self { priority: Reverse(i32::MIN), arrival: u64::MAX };

    /// Sorts by priority alone, the highest first.
    pub(super) fn priority(self) -> Reverse<i32> {
        self.priority
    }

    /// Whether it is of higher priority: not just earlier.
    pub(super) fn outranks(self, other: Self) -> bool {
        self.priority < other.priority
    }
}

/// Where a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Waiting,
    Running,
}

/// A sequence that has not ended.
#[derive(Debug)]
pub(crate) struct Sequence<T> {
    /// What its owner finds with it.
    pub(crate) item: T,
    /// Its prompt, and behind it the generated tokens that the host has seen.
    pub(crate) tokens: Vec<i32>,
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
    /// Tokens whose keys and values are in its pages, steps under way counted as done and what they bring of a draft as right.
    pub(crate) computed: usize,
    /// Tokens that may follow those the host has seen. A step brings them only when no token is under way that the host has not
    /// seen; they stay here until its own are read.
    pub(crate) draft: Vec<i32>,
    /// Tokens sampled by steps under way; what comes of a draft counts as one.
    pub(crate) unread: usize,
    /// Pages it holds, in order.
    pub(crate) pages: Vec<i32>,
    /// Its row of the request table, if it runs.
    pub(crate) slot: usize,
    /// Whether it shares pages whose tokens it never brought itself.
    pub(crate) shared: bool,
    pub(super) limit: usize,
    pub(crate) priority: i32,
    pub(super) arrival: u64,
    pub(super) waits: bool,
    pub(super) whole: bool,
    pub(super) guesses: bool,
    pub(super) place: Place,
    /// Whether the request table knows its last token.
    pub(super) current: bool,
    /// Whether it ever ran.
    pub(super) started: bool,
    /// The step in which it was last given something.
    pub(super) stepped: u64,
    /// Pages whose tokens have been identified, and the identity of the last.
    pub(super) identified: usize,
    pub(super) prefix: Prefix,
    /// Where its pages are while it is swapped out.
    pub(super) host_pages: Vec<u32>,
}

impl<T> Sequence<T> {
    pub(super) fn new(entry: Entry<T>, arrival: u64) -> Self {
        let Entry { prompt, limit, priority, waits, whole, guesses, item } = entry;
        Self {
            item,
            prompt: prompt.len(),
            tokens: prompt,
            computed: 0,
            draft: Vec::new(),
            unread: 0,
            pages: Vec::new(),
            slot: 0,
            shared: false,
            limit,
            priority,
            arrival,
            waits,
            whole,
            guesses,
            place: Place::Waiting,
            current: false,
            started: false,
            stepped: 0,
            identified: 0,
            prefix: Prefix::EMPTY,
            host_pages: Vec::new(),
        }
    }

    /// Tokens generated that the host has seen.
    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    /// Whether it has a place in the request table.
    pub(crate) fn runs(&self) -> bool {
        self.place == Place::Running
    }

    /// Tokens it may still sample.
    pub(crate) fn left(&self) -> usize {
        (self.limit - self.generated()).saturating_sub(self.unread)
    }

    /// Whether the host has to see what is under way before it can go on.
    pub(super) fn waits(&self) -> bool {
        self.unread > 0 && (self.waits || !self.draft.is_empty())
    }

    /// Whether all that is missing to sample its next token is its last one, and the device knows it.
    pub(super) fn generates(&self) -> bool {
        self.current && self.computed + 1 == self.tokens.len() + self.unread
    }

    /// Whether it has tokens to compute in front of the one that it samples from.
    pub(super) fn has_prompt_left(&self) -> bool {
        !self.generates() && self.unprocessed() != 1
    }

    /// Tokens known to the host that are still to be computed.
    pub(super) fn unprocessed(&self) -> usize {
        self.tokens.len().saturating_sub(self.computed)
    }

    /// Has one that guesses go on behind `tokens`, which begin with those it was last told, and sample `limit` more. None of its
    /// steps may be under way. Of what it has computed, what it guessed right stays, and the rest is written over.
    pub(crate) fn resume(&mut self, tokens: &[i32], limit: usize) {
        let (guessed, came) = (self.tokens.iter().skip(self.prompt), tokens.iter().skip(self.prompt));
        let same = self.prompt + guessed.zip(came).take_while(|(guessed, came)| guessed == came).count();
        self.tokens.truncate(same);
        self.tokens.extend(tokens.iter().skip(same));
        (self.prompt, self.limit) = (self.tokens.len(), limit);
        // The last token is always computed, for its logits, and brought by the host.
        self.computed = self.computed.min(same).min(self.prompt.saturating_sub(1));
        self.current = false;
    }

    /// Pages it lacks for the tokens it has.
    pub(super) fn missing_pages(&self, block_size: usize) -> usize {
        let held = self.pages.len() + self.host_pages.len();
        (self.tokens.len() + self.unread).div_ceil(block_size).saturating_sub(held)
    }

    pub(super) fn order(&self) -> Order {
        Order { priority: Reverse(self.priority), arrival: self.arrival }
    }

    /// Gives its pages back, to be computed once more.
    pub(super) fn restart(&mut self, pages: &mut PagePool) {
        pages.give(self.pages.drain(..));
        (self.computed, self.identified, self.prefix) = (0, 0, Prefix::EMPTY);
        self.shared = false;
    }

    /// As [`Self::restart`], but for what is in host memory.
    pub(super) fn restart_unless_swapped(&mut self, pages: &mut PagePool) {
        if self.host_pages.is_empty() {
            self.restart(pages);
        }
    }
}
