//! What runs next. Knows nothing of devices: it hands out places of the request table, pages and tokens of steps, and hears
//! of the tokens that came of them.
//!
//! Requests have an order: by priority, then as they came. In each step:
//!
//! 1. **Admission.** The first that wait are started, while there is a place for them, and pages for all their tokens beside
//!    those that running requests need next. None overtakes another in this queue. A request of higher priority takes the
//!    place of one of lower priority.
//! 2. **Generation.** Every request that generates brings one token. One that has to wait for the host to see its last token
//!    first (see [`Entry::waits`]) is left out of a step that is launched before that, and the others go on.
//! 3. **Prompts** fill the rest of the step's budget (Dynamic SplitFuse). The first gets half of it, so that it is not
//!    starved; the other half goes to the others, the shortest first, so that they are not starved by the first.
//! 4. **Drafts.** What is proposed to follow a request's tokens takes what is left of the budget, and of the pages: it may come
//!    to nothing. A request with a draft waits for the host as in 2.
//!
//! With [`Capacity::prompts_first`], to compare, a step has prompts alone as long as there are some that can be processed: each
//! whole, if it fits into a step at all, in their order.
//!
//! Pages are taken as sequences grow. If none is left, a request takes those of the last in the order that is behind it, which
//! waits again: its tokens are computed once more when it comes back, or its pages are swapped to host memory meanwhile.
//!
//! **Progress.** The first request in the order can take the pages of every other, and no request is admitted that needs more
//! pages than there are. So in every step the first either takes part or only waits for a token that is under way, and after
//! as many steps as it has tokens it is done, whatever the others do.

mod scheduled_step;
mod sequence;
#[cfg(test)]
mod tests;

use crate::kv_cache::{PagePool, Prefix};
pub(crate) use scheduled_step::{Part, StepPlan};
pub(crate) use sequence::Sequence;
use sequence::{Order, Place};
use std::collections::BTreeMap;

/// What a scheduler has to give.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capacity {
    /// Tokens of a step.
    pub(crate) tokens: usize,
    /// Places of the request table; at most `tokens`.
    pub(crate) slots: usize,
    /// Pages of the KV cache.
    pub(crate) pages: usize,
    /// Slots of a page.
    pub(crate) block_size: usize,
    /// Pages of host memory that requests are swapped to; 0 computes them once more instead.
    pub(crate) host_pages: usize,
    /// Whether pages keep their prefix for later requests.
    pub(crate) keep_prefixes: bool,
    /// Whether prompts are processed whole, in steps of their own, before anything is generated.
    pub(crate) prompts_first: bool,
}

/// What is to be scheduled.
#[derive(Debug)]
pub(crate) struct Entry<T> {
    /// Its prompt; at least one token.
    pub(crate) prompt: Vec<i32>,
    /// Tokens to sample, at least one. The scheduler's pages hold the prompt and all of these but the last.
    pub(crate) limit: usize,
    /// Higher goes first.
    pub(crate) priority: i32,
    /// Whether the host has to see a token before the next can be sampled.
    pub(crate) waits: bool,
    /// Whether it brings all its tokens itself, also those that others have brought before.
    pub(crate) whole: bool,
    /// Whether what it samples is only a guess, which [`Sequence::resume`] may take back: no page is known by it.
    pub(crate) guesses: bool,
    /// Whatever its owner wants to find with it.
    pub(crate) item: T,
}

/// Names a sequence. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    index: u32,
    arrival: u64,
}

/// What a scheduler has counted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) preemptions: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) prefix_hit_tokens: u64,
}

/// Decides what runs.
#[derive(Debug)]
pub(crate) struct Scheduler<T> {
    capacity: Capacity,
    pages: PagePool,
    /// Pages of host memory that are free.
    host_pages: Vec<u32>,
    slots: Vec<usize>,
    sequences: Vec<Option<Sequence<T>>>,
    vacant: Vec<u32>,
    waiting: BTreeMap<Order, u32>,
    /// In order. May name sequences that have ended, until the next step is planned.
    running: Vec<Key>,
    /// Sequences that run.
    active: usize,
    /// Of those that run, the ones from here on have been given something in the step that is planned.
    yielding: usize,
    arrivals: u64,
    step: u64,
    counts: Counts,
    /// Prompts of the step that is planned, kept for its memory: the key, and its tokens of the step.
    prompts: Vec<(Key, usize)>,
}

impl<T> Scheduler<T> {
    pub(crate) fn new(capacity: Capacity) -> Self {
        Self {
            capacity,
            pages: PagePool::new(capacity.pages, capacity.block_size, capacity.keep_prefixes),
            host_pages: (0..capacity.host_pages as u32).collect(),
            slots: (0..capacity.slots).rev().collect(),
            sequences: Vec::new(),
            vacant: Vec::new(),
            waiting: BTreeMap::new(),
            running: Vec::new(),
            active: 0,
            yielding: 0,
            arrivals: 0,
            step: 0,
            counts: Counts::default(),
            prompts: Vec::new(),
        }
    }

    /// Takes a sequence. It must fit into all pages.
    pub(crate) fn add(&mut self, entry: Entry<T>) -> Key {
        let arrival = self.arrivals;
        self.arrivals += 1;
        let sequence = Sequence::new(entry, arrival);
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
        Key { index, arrival }
    }

    /// A sequence that has not ended.
    pub(crate) fn get(&self, key: Key) -> Option<&Sequence<T>> {
        let sequence = self.sequences.get(key.index as usize)?.as_ref();
        sequence.filter(|sequence| sequence.arrival == key.arrival)
    }

    /// As [`Self::get`].
    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut Sequence<T>> {
        let sequence = self.sequences.get_mut(key.index as usize)?.as_mut();
        sequence.filter(|sequence| sequence.arrival == key.arrival)
    }

    /// Takes what a part of an earlier step sampled, row by row, as long as it is right: a row behind a token that was proposed
    /// is right if that token is the one that was sampled. Returns how many are; at least the first.
    pub(crate) fn took(&mut self, key: Key, sampled: impl IntoIterator<Item = i32>) -> usize {
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
        // What was proposed in vain is in the cache too, to be written over.
        let right = sequence.tokens.len() + sequence.unread - 1;
        sequence.computed = sequence.computed.min(right);
        let count = sequence.tokens.len() - before;
        self.identify(key);
        count
    }

    /// Ends a sequence, and gives what it had. Its place and pages are free at once.
    pub(crate) fn end(&mut self, key: Key) -> Option<T> {
        self.get(key)?;
        let mut sequence = self.sequences[key.index as usize].take()?;
        self.vacant.push(key.index);
        match sequence.place {
            Place::Waiting => drop(self.waiting.remove(&sequence.order())),
            Place::Running => {
                self.active -= 1;
                self.slots.push(sequence.slot);
            }
        }
        self.pages.give(sequence.pages.drain(..));
        self.host_pages.append(&mut sequence.host_pages);
        Some(sequence.item)
    }

    /// Whether there is nothing to do.
    pub(crate) fn is_idle(&self) -> bool {
        self.active == 0 && self.waiting.is_empty()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn running(&self) -> usize {
        self.active
    }

    /// Whether more of those that run wait for the host to see their tokens than do not.
    pub(crate) fn most_wait(&self) -> bool {
        let waiting = self.running.iter().filter_map(|key| self.get(*key)).filter(|one| one.waits());
        2 * waiting.count() > self.active
    }

    /// Tokens that a step has left behind generation and the prompts of those that run.
    pub(crate) fn room(&self) -> usize {
        let running = self.running.iter().filter_map(|key| self.get(*key));
        let taken = running.map(|sequence| sequence.unprocessed().max(1)).sum();
        self.capacity.tokens.saturating_sub(taken)
    }

    pub(crate) fn pages(&self) -> &PagePool {
        &self.pages
    }

    /// The pages, for who needs some beside the sequences.
    pub(crate) fn pages_mut(&mut self) -> &mut PagePool {
        &mut self.pages
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    pub(crate) fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Sets the tokens of a step, between the places of the request table and what the scheduler was made for.
    pub(crate) fn set_tokens(&mut self, tokens: usize) {
        self.capacity.tokens = tokens.max(self.capacity.slots);
    }

    /// Plans the next step. What it brings counts as computed and what it samples as sampled from here on: the step behind can
    /// be planned before it has run.
    pub(crate) fn plan(&mut self, plan: &mut StepPlan) {
        plan.clear();
        self.step += 1;
        let Self { running, sequences, .. } = self;
        running.retain(|key| {
            let sequence = sequences[key.index as usize].as_ref();
            sequence.is_some_and(|sequence| {
                sequence.arrival == key.arrival && matches!(sequence.place, Place::Running)
            })
        });
        self.yielding = self.running.len();
        self.admit(plan);
        if self.capacity.prompts_first {
            self.plan_whole_prompts(plan);
        }
        if plan.parts.is_empty() {
            self.plan_generation(plan);
            if !self.capacity.prompts_first {
                self.plan_prompts(plan);
            }
            self.plan_drafts(plan);
        }
        // Pages are copied out before any is copied in, so these must not be copied to in the same step.
        self.host_pages.extend(plan.swap_in.iter().map(|(host_page, _)| host_page));
    }

    /// Starts the first that wait.
    fn admit(&mut self, plan: &mut StepPlan) {
        if self.waiting.is_empty() {
            return;
        }
        // What those that run need next is not given to others.
        let block = self.capacity.block_size;
        let next = |sequence: &Sequence<T>| sequence.missing_pages(block).max(1);
        let mut reserved: usize = self.running.iter().filter_map(|key| self.get(*key)).map(next).sum();
        while let Some((order, index)) = self.waiting.first_key_value().map(|(order, index)| (*order, *index))
        {
            let key = Key { index, arrival: order.arrival };
            if self.get(key).is_none_or(|sequence| sequence.unread > 0) {
                break; // its tokens are on their way
            }
            let yields = |scheduler: &mut Self| {
                scheduler.last_that_yields().filter(|last| order.outranks(scheduler.order(*last)))
            };
            if self.slots.is_empty() && yields(self).is_none() {
                return;
            }
            self.find_prefix(key);
            while !self.has_room(key, reserved) {
                let Some(last) = yields(self) else {
                    self.drop_prefix(key);
                    return;
                };
                reserved -= self.get(last).map_or(0, next).min(reserved);
                self.preempt_last(plan);
            }
            self.waiting.remove(&order);
            reserved += self.start(key, plan);
        }
    }

    /// Whether a waiting sequence can be started.
    fn has_room(&self, key: Key, reserved: usize) -> bool {
        let Some(sequence) = self.get(key) else { return false };
        let needed = sequence.missing_pages(self.capacity.block_size) + sequence.host_pages.len();
        !self.slots.is_empty() && needed + reserved <= self.pages.available()
    }

    /// Gives a waiting sequence a place. Returns the pages it will need next.
    fn start(&mut self, key: Key, plan: &mut StepPlan) -> usize {
        let Some(slot) = self.slots.pop() else { return 0 };
        let Some(sequence) = self.sequences[key.index as usize].as_mut() else { return 0 };
        (sequence.place, sequence.slot, sequence.stepped) = (Place::Running, slot, self.step);
        sequence.current = false;
        if !sequence.started {
            sequence.started = true;
            self.counts.prompt_tokens += sequence.tokens.len() as u64;
            self.counts.prefix_hit_tokens += sequence.computed as u64;
        }
        for host_page in sequence.host_pages.drain(..) {
            // There is one: the caller has counted.
            let Some(page) = self.pages.take() else { break };
            sequence.pages.push(page);
            plan.swap_in.push((host_page, page));
        }
        let needed = sequence.missing_pages(self.capacity.block_size);
        let order = sequence.order();
        plan.placed.push((key, sequence.computed));
        self.active += 1;
        let place = self.running.partition_point(|other| self.order(*other) < order);
        self.running.insert(place, key);
        if place <= self.yielding {
            self.yielding += 1;
        }
        needed.max(1)
    }

    /// The order of a sequence that has not ended.
    fn order(&self, key: Key) -> Order {
        self.get(key).map_or(Order::LAST, Sequence::order)
    }

    /// The last of the running sequences that has not been given anything in this step.
    fn last_that_yields(&mut self) -> Option<Key> {
        while let Some(key) = self.yielding.checked_sub(1).and_then(|last| self.running.get(last)).copied() {
            if self.get(key).is_some_and(|sequence| sequence.stepped != self.step) {
                return Some(key);
            }
            self.yielding -= 1;
        }
        None
    }

    /// Takes place and pages from the sequence that [`Self::last_that_yields`] has found. It waits again.
    fn preempt_last(&mut self, plan: &mut StepPlan) {
        let Some(last) = self.yielding.checked_sub(1) else { return };
        let key = self.running.remove(last);
        self.yielding = last;
        let Some(sequence) = self.sequences[key.index as usize].as_mut() else { return };
        sequence.place = Place::Waiting;
        self.slots.push(sequence.slot);
        self.active -= 1;
        self.counts.preemptions += 1;
        let used = sequence.computed.div_ceil(self.capacity.block_size).min(sequence.pages.len());
        if used > 0 && used <= self.host_pages.len() {
            let free = self.host_pages.len() - used;
            sequence.host_pages.extend(self.host_pages.drain(free..));
            plan.swap_out.extend(sequence.pages.iter().copied().zip(sequence.host_pages.iter().copied()));
            self.pages.give(sequence.pages.drain(..));
        } else {
            sequence.restart(&mut self.pages);
        }
        self.waiting.insert(sequence.order(), key.index);
    }

    /// Every request that generates brings a token.
    fn plan_generation(&mut self, plan: &mut StepPlan) {
        self.prompts.clear();
        let mut index = 0;
        // The list gets shorter, behind this index, where sequences are pre-empted.
        while let Some(key) = self.running.get(index).copied() {
            index += 1;
            let Some(sequence) = self.get(key) else { continue };
            if sequence.left() == 0 || sequence.waits() {
                continue;
            }
            if sequence.has_prompt_left() {
                self.prompts.push((key, 0));
                continue;
            }
            // The host knows its last token, if the device does not.
            let from = (!sequence.generates()).then_some(sequence.computed);
            let end = sequence.computed + 1;
            if plan.tokens < self.capacity.tokens && self.grow(key, end, plan) == end {
                self.add_part(key, 1, from, plan);
            }
        }
    }

    /// Prompts fill the step in their order, only the first of them cut if need be.
    fn plan_whole_prompts(&mut self, plan: &mut StepPlan) {
        let mut left = self.capacity.tokens;
        self.prompts.clear();
        for key in &self.running {
            let Some(sequence) = self.get(*key) else { continue };
            if sequence.left() == 0 || sequence.waits() || !sequence.has_prompt_left() {
                continue;
            }
            let rest = sequence.unprocessed();
            // Nothing is left of one whose last tokens are under way.
            if rest == 0 {
                continue;
            }
            if rest > left && !self.prompts.is_empty() {
                break;
            }
            let share = rest.min(left);
            left -= share;
            self.prompts.push((*key, share));
        }
        self.add_prompts(plan);
    }

    /// Chunks of prompts fill the step.
    fn plan_prompts(&mut self, plan: &mut StepPlan) {
        let mut prompts = std::mem::take(&mut self.prompts);
        // Generation may have taken the pages of some.
        prompts.retain(|(key, _)| self.get(*key).is_some_and(Sequence::runs));
        let mut left = self.capacity.tokens - plan.tokens;
        let rest = |scheduler: &Self, key| scheduler.get(key).map_or(0, Sequence::unprocessed);
        if let Some(((first, share), others)) = prompts.split_first_mut() {
            *share = rest(self, *first).min(if others.is_empty() { left } else { left.div_ceil(2) });
            left -= *share;
            others.sort_by_key(|(key, _)| (self.order(*key).priority(), rest(self, *key)));
            for (key, share) in others {
                *share = rest(self, *key).min(left);
                left -= *share;
            }
            *share += left.min(rest(self, *first) - *share);
        }
        self.prompts = prompts;
        self.add_prompts(plan);
    }

    /// Adds prompts to the step, of each as many tokens as it has been given a share of.
    fn add_prompts(&mut self, plan: &mut StepPlan) {
        let prompts = std::mem::take(&mut self.prompts);
        for (key, share) in prompts.iter().copied() {
            // An earlier one may have taken its pages, or had the same prefix.
            if !self.get(key).is_some_and(Sequence::runs) {
                continue;
            }
            let found = self.find_prefix(key);
            let Some(sequence) = self.get(key) else { continue };
            if found > 0 {
                plan.placed.push((key, sequence.computed));
            }
            let (from, end) = (sequence.computed, sequence.computed + share.min(sequence.unprocessed()));
            let tokens = self.grow(key, end, plan).min(end).saturating_sub(from);
            if share > 0 && tokens > 0 {
                self.add_part(key, tokens, Some(from), plan);
            }
        }
        self.prompts = prompts;
    }

    /// Drafts take what is left of the step, in order. Nobody yields a page to one, and one is left to each that runs.
    fn plan_drafts(&mut self, plan: &mut StepPlan) {
        for index in 0..plan.parts.len() {
            let Part { key, tokens, samples, .. } = plan.parts[index];
            let Some(sequence) = self.get(key) else { continue };
            if samples == 0 || sequence.draft.is_empty() {
                continue;
            }
            let spare = self.pages.available().saturating_sub(self.active);
            let slots = (sequence.pages.len() + spare) * self.capacity.block_size;
            let computed = sequence.computed;
            let most = sequence.left().min(self.capacity.tokens - plan.tokens).min(slots - computed);
            let count = sequence.draft.len().min(most);
            self.grow(key, computed + count, plan);
            let Some(sequence) = self.get_mut(key) else { continue };
            sequence.draft.truncate(count);
            if count == 0 {
                continue;
            }
            sequence.computed += count;
            // The device hears of its last token from the host.
            sequence.current = false;
            let part = &mut plan.parts[index];
            part.from.get_or_insert(computed - tokens);
            part.tokens += count;
            part.samples += count;
            plan.tokens += count;
        }
    }

    fn add_part(&mut self, key: Key, tokens: usize, from: Option<usize>, plan: &mut StepPlan) {
        let step = self.step;
        let Some(sequence) = self.get_mut(key) else { return };
        sequence.stepped = step;
        sequence.computed += tokens;
        let samples = from.is_none() || sequence.computed == sequence.tokens.len();
        if samples {
            sequence.unread += 1;
            sequence.current = true;
        }
        plan.tokens += tokens;
        plan.parts.push(Part { key, tokens, from, samples: usize::from(samples) });
        self.identify(key);
    }

    /// Gives a sequence pages for `end` tokens, from those behind it if need be. Returns for how many it has some.
    fn grow(&mut self, key: Key, end: usize, plan: &mut StepPlan) -> usize {
        let block = self.capacity.block_size;
        let Some(before) = self.get(key).map(|sequence| sequence.pages.len()) else { return 0 };
        let mut count = before;
        while count * block < end {
            let page = self.pages.take();
            if let (Some(page), Some(sequence)) = (page, self.get_mut(key)) {
                sequence.pages.push(page);
                count += 1;
                continue;
            }
            let order = self.order(key);
            match self.last_that_yields() {
                Some(last) if order < self.order(last) => self.preempt_last(plan),
                _ => break,
            }
        }
        if count > before {
            plan.grown.push((key, before));
        }
        (count * block).min(end)
    }

    /// Lets a sequence share the pages of what it has in common with others, as far as it has computed nothing behind them. Its
    /// last token is always left to compute: its logits are wanted. Returns how many pages it found.
    fn find_prefix(&mut self, key: Key) -> usize {
        let block = self.capacity.block_size;
        let Self { pages, sequences, .. } = self;
        let Some(sequence) = sequences[key.index as usize].as_mut() else { return 0 };
        let begin = sequence.pages.len();
        while !sequence.whole
            && sequence.host_pages.is_empty()
            && sequence.computed == sequence.identified * block
            && sequence.pages.len() == sequence.identified
            && sequence.computed + block < sequence.tokens.len()
        {
            let tokens = &sequence.tokens[sequence.computed..sequence.computed + block];
            let Some((page, prefix)) = pages.share(sequence.prefix, tokens) else { break };
            sequence.pages.push(page);
            sequence.prefix = prefix;
            sequence.identified += 1;
            sequence.computed += block;
        }
        let found = sequence.pages.len() - begin;
        sequence.shared |= found > 0;
        if sequence.runs() {
            self.counts.prefix_hit_tokens += (found * block) as u64;
        }
        found
    }

    /// Takes back what [`Self::find_prefix`] gave a sequence that waits on.
    fn drop_prefix(&mut self, key: Key) {
        let Self { pages, sequences, .. } = self;
        if let Some(sequence) = sequences[key.index as usize].as_mut() {
            sequence.restart_unless_swapped(pages);
        }
    }

    /// Lets others find the pages that a sequence has filled with tokens the host knows.
    fn identify(&mut self, key: Key) {
        let block = self.capacity.block_size;
        let Self { pages, sequences, .. } = self;
        let Some(sequence) = sequences[key.index as usize].as_mut() else { return };
        let known = if sequence.guesses { sequence.prompt } else { sequence.tokens.len() };
        let known = known.min(sequence.computed);
        while (sequence.identified + 1) * block <= known {
            let start = sequence.identified * block;
            let Some(page) = sequence.pages.get(sequence.identified).copied() else { break };
            sequence.prefix = pages.identify(page, sequence.prefix, &sequence.tokens[start..start + block]);
            sequence.identified += 1;
        }
    }
}
