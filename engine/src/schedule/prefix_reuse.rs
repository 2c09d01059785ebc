//! Prefix caching: sequences with a common prefix share its pages, and load them from the store of pages.

use super::{
    scheduled_step::ScheduledStep,
    scheduler::Scheduler,
    sequence::{Sequence, SequenceKey, StoredPrefix},
};
use crate::kv_cache::{PageMove, StoredPage, Tier};

impl<T> Scheduler<T> {
    /// Adds cached pages that hold the next tokens of a sequence, if all pages that it holds so far are full. The last token
    /// is always computed, because its logits are needed. Returns the number of pages found.
    pub(super) fn find_prefix(&mut self, key: SequenceKey) -> usize {
        let block = self.capacity.block_size;
        let Self { pages, sequences, .. } = self;
        let Some(sequence) = sequences[key.index as usize].as_mut() else { return 0 };
        let begin = sequence.pages.len();
        while sequence.may_reuse(block) {
            let tokens = &sequence.tokens[sequence.computed..sequence.computed + block];
            let Some((page, prefix)) = pages.share(sequence.prefix, tokens) else { break };
            sequence.pages.push(page);
            sequence.prefix = prefix;
            sequence.identified += 1;
            sequence.computed += block;
        }
        let found = sequence.pages.len() - begin;
        sequence.shares_pages |= found > 0;
        if sequence.runs() {
            sequence.reused += found * block;
            self.counts.prefix_hit_tokens += (found * block) as u64;
        }
        found
    }

    /// Fills pages with the next tokens of a waiting sequence from the store, if it has them. The pages of the sequence must be
    /// available. Returns whether the sequence can start; otherwise pages are on their way to the host. Those that have already
    /// arrived keep their prefix when [`Self::drop_prefix`] releases them.
    pub(super) fn load_prefix(&mut self, key: SequenceKey, step: &mut ScheduledStep) -> bool {
        let block = self.capacity.block_size;
        let Some(store) = self.store.clone() else { return true };
        loop {
            let Some(sequence) = self.sequences[key.index as usize].as_mut() else { return true };
            if !sequence.may_reuse(block) {
                return true;
            }
            let begin = sequence.computed;
            match std::mem::replace(&mut sequence.stored, StoredPrefix::Exhausted) {
                StoredPrefix::Exhausted => return true,
                StoredPrefix::Unknown => {
                    let mut last = sequence.prefix.key();
                    // The last token is always computed, because its logits are needed.
                    let known = &sequence.tokens[begin..sequence.tokens.len() - 1];
                    let keys = known.chunks_exact(block).map_while(|tokens| {
                        last = last.map(|last| last.after(tokens));
                        last
                    });
                    if let Some(fetch) = store.fetch(keys) {
                        sequence.stored = StoredPrefix::Fetching(begin, fetch);
                    }
                }
                StoredPrefix::Fetching(first, mut fetch) => match fetch.poll() {
                    None => {
                        sequence.stored = StoredPrefix::Fetching(first, fetch);
                        return false;
                    }
                    // Meanwhile other sequences may have computed the first of these pages, or evicted pages in front of them.
                    Some(pages) if first <= begin && first + pages.len() * block > begin => {
                        sequence.stored = StoredPrefix::Unknown;
                        self.load_pages(key, &pages[(begin - first) / block..], step);
                    }
                    Some(_) => {}
                },
            }
        }
    }

    /// Fills pages with the next tokens of a sequence.
    fn load_pages(&mut self, key: SequenceKey, stored: &[StoredPage], step: &mut ScheduledStep) {
        let block = self.capacity.block_size;
        let Some(taken) = self.pages.take_many(stored.len()) else { return };
        self.save_evicted(&mut step.moves);
        let Self { pages, sequences, counts, .. } = self;
        let Some(sequence) = sequences[key.index as usize].as_mut() else { return };
        for (stored, page) in stored.iter().zip(taken) {
            let tokens = &sequence.tokens[sequence.computed..sequence.computed + block];
            sequence.prefix = pages.identify_stored(page, sequence.prefix, tokens);
            sequence.pages.push(page);
            sequence.identified += 1;
            sequence.computed += block;
            counts.loaded_tokens[usize::from(stored.tier == Tier::Folder)] += block as u64;
            step.moves.push(PageMove::Load(stored.clone(), page));
        }
        sequence.shares_pages = true;
    }

    /// If the first waiting sequence waits for pages from the store, waits until they are there. Returns whether it did.
    pub(crate) fn wait_for_pages(&mut self) -> bool {
        let first = self.waiting.first_key_value().map(|(_, index)| *index as usize);
        let sequence = first.and_then(|index| self.sequences.get_mut(index)?.as_mut());
        match sequence.map(|sequence| &mut sequence.stored) {
            Some(StoredPrefix::Fetching(_, fetch)) => {
                fetch.wait();
                true
            }
            _ => false,
        }
    }

    /// Releases the pages that [`Self::find_prefix`] gave to a sequence that could not start.
    pub(super) fn drop_prefix(&mut self, key: SequenceKey) {
        let Self { pages, sequences, .. } = self;
        if let Some(sequence) = sequences[key.index as usize].as_mut() {
            sequence.restart_unless_swapped(pages);
        }
    }

    /// Identifies the pages that a sequence has filled with tokens the host knows, so that other sequences can find them.
    pub(super) fn identify_pages(&mut self, key: SequenceKey) {
        let block = self.capacity.block_size;
        let Self { pages, sequences, .. } = self;
        let Some(sequence) = sequences[key.index as usize].as_mut() else { return };
        let Sequence { provisional, prompt, .. } = *sequence;
        let known = if provisional { prompt } else { sequence.tokens.len() };
        let known = known.min(sequence.computed);
        while (sequence.identified + 1) * block <= known {
            let start = sequence.identified * block;
            let Some(page) = sequence.pages.get(sequence.identified).copied() else { break };
            sequence.prefix = pages.identify(page, sequence.prefix, &sequence.tokens[start..start + block]);
            sequence.identified += 1;
        }
    }
}
