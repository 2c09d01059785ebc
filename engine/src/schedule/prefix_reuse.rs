//! Prefix caching: sequences with a common prefix share its pages.

use super::{
    scheduler::{Scheduler, SequenceKey},
    sequence::Sequence,
};

impl<T> Scheduler<T> {
    /// Adds cached pages that hold the next tokens of a sequence, if all pages that it holds so far are full. The last token
    /// is always computed, because its logits are needed. Returns the number of pages found.
    pub(super) fn find_prefix(&mut self, key: SequenceKey) -> usize {
        let block = self.capacity.block_size;
        let Self { pages, sequences, .. } = self;
        let Some(sequence) = sequences[key.index as usize].as_mut() else { return 0 };
        let begin = sequence.pages.len();
        while sequence.reuses_prefix
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
        sequence.shares_pages |= found > 0;
        if sequence.runs() {
            sequence.reused += found * block;
            self.counts.prefix_hit_tokens += (found * block) as u64;
        }
        found
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
