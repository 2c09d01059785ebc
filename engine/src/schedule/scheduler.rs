//! The scheduler's state: its sequences, and the resources that they hold.

use super::{
    scheduled_step::ScheduledStep,
    sequence::{NewSequence, Order, Sequence, SequenceKey, SequenceState},
};
use crate::kv_cache::{PageKey, PageMove, PagePool, PageStore, Tier};
use std::{collections::BTreeMap, sync::Arc};

/// The resources that a scheduler hands out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capacity {
    /// Tokens of a step.
    pub(crate) tokens: usize,
    /// Rows of the request table; at most `tokens`.
    pub(crate) slots: usize,
    /// Pages of the KV cache.
    pub(crate) pages: usize,
    /// Token slots of a page.
    pub(crate) block_size: usize,
    /// Pages of host memory that pre-empted requests are swapped to; with 0 they are recomputed instead.
    pub(crate) host_pages: usize,
    /// Whether pages keep their prefix for later requests.
    pub(crate) keep_prefixes: bool,
    /// Whether prompts are processed whole, in steps of their own, before any request generates.
    pub(crate) prompts_first: bool,
    /// Whether the host sends every sampled token back as an input, because the rank that embeds it is not the rank that sampled
    /// it.
    pub(crate) tokens_from_host: bool,
    /// The number of groups into which generating sequences are divided: each pipeline stage works on one of them.
    pub(crate) micro_batches: usize,
}

/// Counts of a scheduler since it was made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SchedulerCounts {
    /// Sequences that were pre-empted.
    pub(crate) preemptions: u64,
    /// Prompt tokens of the sequences that were started.
    pub(crate) prompt_tokens: u64,
    /// Prompt tokens that were found in the cache.
    pub(crate) prefix_hit_tokens: u64,
    /// Tokens whose pages came from host memory, and from a folder.
    pub(crate) loaded_tokens: [u64; 2],
}

/// Decides which sequences take part in each step.
#[derive(Debug)]
pub(crate) struct Scheduler<T> {
    pub(super) capacity: Capacity,
    pub(super) pages: PagePool,
    /// Pages outside the device.
    pub(super) store: Option<Arc<PageStore>>,
    /// Free pages of host memory.
    pub(super) host_pages: Vec<u32>,
    /// Free rows of the request table.
    pub(super) slots: Vec<usize>,
    pub(super) sequences: Vec<Option<Sequence<T>>>,
    /// Free entries of `sequences`.
    pub(super) vacant: Vec<u32>,
    pub(super) waiting: BTreeMap<Order, u32>,
    /// Running sequences in their order. May contain sequences that have ended, until the next step is planned.
    pub(super) running: Vec<SequenceKey>,
    /// The number of running sequences.
    pub(super) active: usize,
    /// `running[..preemptible]` may still be pre-empted; later sequences already have tokens in the step being planned.
    pub(super) preemptible: usize,
    pub(super) arrivals: u64,
    /// The number of the step that is planned.
    pub(super) step: u64,
    pub(super) counts: SchedulerCounts,
    /// The prompts of the step being planned, with the number of their tokens in it. Kept to reuse its allocation.
    pub(super) prompts: Vec<(SequenceKey, usize)>,
}

impl<T> Scheduler<T> {
    /// A scheduler that hands out these resources.
    pub(crate) fn new(capacity: Capacity) -> Self {
        Self::with_store(capacity, None)
    }

    /// A scheduler that also keeps pages in a store, which knows the empty prefix by this key.
    pub(crate) fn with_store(capacity: Capacity, store: Option<(PageKey, Arc<PageStore>)>) -> Self {
        let (model, store) = store.unzip();
        Self {
            capacity,
            pages: PagePool::new(capacity.pages, capacity.block_size, capacity.keep_prefixes, model),
            store,
            host_pages: (0..capacity.host_pages as u32).collect(),
            slots: (0..capacity.slots).rev().collect(),
            sequences: Vec::new(),
            vacant: Vec::new(),
            waiting: BTreeMap::new(),
            running: Vec::new(),
            active: 0,
            preemptible: 0,
            arrivals: 0,
            step: 0,
            counts: SchedulerCounts::default(),
            prompts: Vec::new(),
        }
    }

    /// Queues a sequence, which must fit into the pages of the scheduler.
    pub(crate) fn add(&mut self, new: NewSequence<T>) -> SequenceKey {
        let arrival = self.arrivals;
        self.arrivals += 1;
        let mut sequence = Sequence::new(new, arrival);
        sequence.waits_for_host |= self.capacity.tokens_from_host;
        let order = sequence.order();
        let index = match self.vacant.pop() {
            Some(index) => {
                self.sequences[index as usize] = Some(sequence);
                index
            }
            None => {
                self.sequences.push(Some(sequence));
                self.sequences.len() as u32 - 1
            }
        };
        self.waiting.insert(order, index);
        SequenceKey { index, arrival }
    }

    /// A sequence that has not ended.
    pub(crate) fn get(&self, key: SequenceKey) -> Option<&Sequence<T>> {
        let sequence = self.sequences.get(key.index as usize)?.as_ref();
        sequence.filter(|sequence| sequence.arrival == key.arrival)
    }

    /// Same as [`Self::get`].
    pub(crate) fn get_mut(&mut self, key: SequenceKey) -> Option<&mut Sequence<T>> {
        let sequence = self.sequences.get_mut(key.index as usize)?.as_mut();
        sequence.filter(|sequence| sequence.arrival == key.arrival)
    }

    /// Accepts the tokens that a step sampled for a sequence, row by row. A row is valid if the proposed token before it
    /// equals the token sampled in the row before. Returns the number of valid rows, at least one.
    pub(crate) fn accept_tokens(
        &mut self,
        key: SequenceKey,
        sampled: impl IntoIterator<Item = i32>,
    ) -> usize {
        let Some(sequence) = self.get_mut(key) else { return 0 };
        let before = sequence.tokens.len();
        let mut proposed = std::mem::take(&mut sequence.draft).into_iter();
        for token in sampled {
            sequence.tokens.push(token);
            if proposed.next() != Some(token) {
                break;
            }
        }
        sequence.unread -= 1;
        // The KV cache also holds the rejected tokens; later tokens overwrite them.
        let valid = sequence.tokens.len() + sequence.unread - 1;
        sequence.computed = sequence.computed.min(valid);
        let count = sequence.tokens.len() - before;
        self.identify_pages(key);
        count
    }

    /// Ends a sequence and returns the caller's data. Its row and its pages are free at once.
    pub(crate) fn end(&mut self, key: SequenceKey) -> Option<T> {
        self.get(key)?;
        let mut sequence = self.sequences[key.index as usize].take()?;
        self.vacant.push(key.index);
        match sequence.state {
            SequenceState::Waiting => drop(self.waiting.remove(&sequence.order())),
            SequenceState::Running => {
                self.active -= 1;
                self.slots.push(sequence.slot);
            }
        }
        self.pages.release(sequence.pages.drain(..));
        self.host_pages.append(&mut sequence.host_pages);
        Some(sequence.item)
    }

    /// Whether no sequence waits or runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.active == 0 && self.waiting.is_empty()
    }

    /// The number of waiting sequences.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The number of running sequences.
    pub(crate) fn running(&self) -> usize {
        self.active
    }

    /// Whether most of the running sequences wait for the host to read their tokens.
    pub(crate) fn most_wait_for_host(&self) -> bool {
        let running = self.running.iter().filter_map(|key| self.get(*key));
        2 * running.filter(|sequence| sequence.waits_for_host()).count() > self.active
    }

    /// The part of a step's token budget that running sequences do not need.
    pub(crate) fn spare_tokens(&self) -> usize {
        let running = self.running.iter().filter_map(|key| self.get(*key));
        let taken = running.map(|sequence| sequence.unprocessed().max(1)).sum();
        self.capacity.tokens.saturating_sub(taken)
    }

    /// The pages of the KV cache.
    pub(crate) fn pages(&self) -> &PagePool {
        &self.pages
    }

    /// The pages, for work that needs some besides the sequences.
    pub(crate) fn pages_mut(&mut self) -> &mut PagePool {
        &mut self.pages
    }

    /// The counts so far.
    pub(crate) fn counts(&self) -> SchedulerCounts {
        self.counts
    }

    /// The resources that the scheduler hands out.
    pub(crate) fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Sets the token budget of a step: at least the rows of the request table, at most what the scheduler was made for.
    pub(crate) fn set_tokens(&mut self, tokens: usize) {
        self.capacity.tokens = tokens.max(self.capacity.slots);
    }

    /// Plans the next step. From here on its tokens count as computed and its samples as drawn, so that the step after it can
    /// be planned before this one has run.
    pub(crate) fn plan(&mut self, step: &mut ScheduledStep) {
        step.clear();
        self.step += 1;
        self.save_pages(&mut step.moves);
        let Self { running, sequences, .. } = self;
        running.retain(|key| {
            let sequence = sequences[key.index as usize].as_ref();
            sequence.is_some_and(|sequence| {
                sequence.arrival == key.arrival && matches!(sequence.state, SequenceState::Running)
            })
        });
        self.preemptible = self.running.len();
        self.admit(step);
        if self.capacity.prompts_first {
            self.plan_whole_prompts(step);
        }
        if step.sequences.is_empty() {
            self.plan_generation(step);
            if !self.capacity.prompts_first {
                self.plan_prompts(step);
            }
            self.plan_drafts(step);
        }
        self.save_evicted(&mut step.moves);
    }

    /// Adds the copies of pages that are to be kept outside the device. All steps planned so far must be launched.
    pub(crate) fn save_pages(&mut self, moves: &mut Vec<PageMove>) {
        let filled = self.pages.take_filled();
        self.save(filled, Tier::Folder, moves);
        self.save_evicted(moves);
    }

    /// Adds the copies of pages that have just lost their prefix, which must precede what is written to these pages.
    pub(super) fn save_evicted(&mut self, moves: &mut Vec<PageMove>) {
        let evicted = self.pages.take_evicted();
        self.save(evicted, Tier::Host, moves);
    }

    fn save(&self, pages: Vec<(i32, PageKey)>, tier: Tier, moves: &mut Vec<PageMove>) {
        let Some(store) = &self.store else { return };
        let lacking = pages.into_iter().filter(|(_, key)| store.lacks(key, tier));
        moves.extend(lacking.map(|(page, key)| PageMove::Save(page, key, tier)));
    }

    /// The order of a sequence; last if it has ended.
    pub(super) fn order(&self, key: SequenceKey) -> Order {
        self.get(key).map_or(Order::LAST, Sequence::order)
    }
}
