//! Admission and pre-emption: which sequences run.

use super::{
    scheduled_step::ScheduledStep,
    scheduler::Scheduler,
    sequence::{Sequence, SequenceKey, SequenceState, StoredPrefix},
};
use crate::kv_cache::PageMove;

impl<T> Scheduler<T> {
    /// Starts the first waiting sequences.
    pub(super) fn admit(&mut self, step: &mut ScheduledStep) {
        if self.waiting.is_empty() {
            return;
        }
        // Pages that running sequences need in the next step are reserved.
        let block = self.capacity.block_size;
        let needed_next = |sequence: &Sequence<T>| sequence.missing_pages(block).max(1);
        let running = self.running.iter().filter_map(|key| self.get(*key));
        let mut reserved: usize = running.map(needed_next).sum();
        while let Some((order, index)) = self.waiting.first_key_value().map(|(order, index)| (*order, *index))
        {
            let key = SequenceKey { index, arrival: order.arrival };
            if self.get(key).is_none_or(|sequence| sequence.unread > 0) {
                break; // its tokens are in flight
            }
            let outranked = |scheduler: &mut Self| {
                scheduler.last_preemptible().filter(|last| order.outranks(scheduler.order(*last)))
            };
            if self.slots.is_empty() && outranked(self).is_none() {
                return;
            }
            self.find_prefix(key);
            while !self.has_room(key, reserved) {
                let Some(last) = outranked(self) else {
                    self.drop_prefix(key);
                    return;
                };
                reserved -= self.get(last).map_or(0, needed_next).min(reserved);
                self.preempt_last(step);
            }
            if !self.load_prefix(key, step) {
                // Later sequences wait as well, so that they do not take the pages that it needs.
                self.drop_prefix(key);
                return;
            }
            self.waiting.remove(&order);
            reserved += self.start(key, step);
        }
    }

    /// Whether a waiting sequence can start.
    fn has_room(&self, key: SequenceKey, reserved: usize) -> bool {
        let Some(sequence) = self.get(key) else { return false };
        let needed = sequence.missing_pages(self.capacity.block_size) + sequence.host_pages.len();
        !self.slots.is_empty() && needed + reserved <= self.pages.available()
    }

    /// Starts a waiting sequence. Returns the pages it needs next.
    fn start(&mut self, key: SequenceKey, step: &mut ScheduledStep) -> usize {
        let Some(slot) = self.slots.pop() else { return 0 };
        let Some(sequence) = self.sequences[key.index as usize].as_mut() else { return 0 };
        (sequence.state, sequence.slot, sequence.last_step) = (SequenceState::Running, slot, self.step);
        sequence.device_has_last_token = false;
        if !sequence.was_started {
            sequence.was_started = true;
            self.counts.prompt_tokens += sequence.tokens.len() as u64;
            self.counts.prefix_hit_tokens += sequence.computed as u64;
            sequence.reused = sequence.computed;
        }
        let host_pages = std::mem::take(&mut sequence.host_pages);
        // `has_room` has counted these pages, so they are there.
        let pages = self.pages.take_many(host_pages.len()).unwrap_or_default();
        sequence.pages.extend(&pages);
        self.save_evicted(&mut step.moves);
        step.moves
            .extend(host_pages.iter().zip(pages).map(|(host_page, page)| PageMove::SwapIn(*host_page, page)));
        // Moves happen in order, so these can be written to again.
        self.host_pages.extend(host_pages);
        let Some(sequence) = self.get(key) else { return 0 };
        let needed = sequence.missing_pages(self.capacity.block_size);
        let order = sequence.order();
        step.placed.push((key, sequence.computed));
        self.active += 1;
        let place = self.running.partition_point(|other| self.order(*other) < order);
        self.running.insert(place, key);
        if place <= self.preemptible {
            self.preemptible += 1;
        }
        needed.max(1)
    }

    /// The last running sequence that has no tokens in this step yet.
    pub(super) fn last_preemptible(&mut self) -> Option<SequenceKey> {
        while let Some(key) = self.preemptible.checked_sub(1).and_then(|last| self.running.get(last)).copied()
        {
            if self.get(key).is_some_and(|sequence| sequence.last_step != self.step) {
                return Some(key);
            }
            self.preemptible -= 1;
        }
        None
    }

    /// Pre-empts the sequence that [`Self::last_preemptible`] returned: frees its row and its pages, and puts it back into the
    /// queue.
    pub(super) fn preempt_last(&mut self, step: &mut ScheduledStep) {
        let Some(last) = self.preemptible.checked_sub(1) else { return };
        let key = self.running.remove(last);
        self.preemptible = last;
        let Some(sequence) = self.sequences[key.index as usize].as_mut() else { return };
        sequence.state = SequenceState::Waiting;
        sequence.stored = StoredPrefix::Unknown;
        self.slots.push(sequence.slot);
        self.active -= 1;
        self.counts.preemptions += 1;
        let used = sequence.computed.div_ceil(self.capacity.block_size).min(sequence.pages.len());
        if used > 0 && used <= self.host_pages.len() {
            let free = self.host_pages.len() - used;
            sequence.host_pages.extend(self.host_pages.drain(free..));
            let pairs = sequence.pages.iter().zip(&sequence.host_pages);
            step.moves.extend(pairs.map(|(page, host_page)| PageMove::SwapOut(*page, *host_page)));
            self.pages.release(sequence.pages.drain(..));
        } else {
            sequence.restart(&mut self.pages);
        }
        self.waiting.insert(sequence.order(), key.index);
    }
}
