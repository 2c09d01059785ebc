//! Composes a step from decode tokens, prefill chunks and drafts.

use super::{
    scheduled_step::{ScheduledSequence, ScheduledStep},
    scheduler::Scheduler,
    sequence::{Sequence, SequenceKey},
};

impl<T> Scheduler<T> {
    /// Adds one token of each generating sequence, or of one micro-batch of them, and collects the sequences with prompt tokens
    /// left.
    pub(super) fn plan_generation(&mut self, step: &mut ScheduledStep) {
        self.prompts.clear();
        let mut left = self.micro_batch();
        let mut index = 0;
        // Pre-emption removes only entries after this index.
        while let Some(key) = self.running.get(index).copied() {
            index += 1;
            let Some(sequence) = self.get(key) else { continue };
            if sequence.remaining() == 0 || sequence.waits_for_host() {
                continue;
            }
            if sequence.has_prompt_left() {
                self.prompts.push((key, 0));
                continue;
            }
            if left == 0 {
                continue;
            }
            // If the device does not have the last token, the host sends it.
            let from = (!sequence.is_generating()).then_some(sequence.computed);
            let end = sequence.computed + 1;
            if step.tokens < self.capacity.tokens && self.grow(key, end, step) == end {
                self.add_to_step(key, 1, from, step);
                left -= 1;
            }
        }
    }

    /// The maximum number of sequences that generate in a step: an even share of all that do.
    ///
    /// A sequence waits for less than `micro_batches` steps: the steps in flight together have room for all sequences, and no
    /// sequence is in two of them.
    fn micro_batch(&self) -> usize {
        if self.capacity.micro_batches <= 1 {
            return usize::MAX;
        }
        let running = self.running.iter().filter_map(|key| self.get(*key));
        let generates = |sequence: &&Sequence<T>| sequence.waits_for_host() || !sequence.has_prompt_left();
        running.filter(generates).count().div_ceil(self.capacity.micro_batches)
    }

    /// Fills the step with whole prompts, in order. Only the first is split, and only if it is longer than a step.
    pub(super) fn plan_whole_prompts(&mut self, step: &mut ScheduledStep) {
        let mut left = self.capacity.tokens;
        self.prompts.clear();
        for key in &self.running {
            let Some(sequence) = self.get(*key) else { continue };
            if sequence.remaining() == 0 || sequence.waits_for_host() || !sequence.has_prompt_left() {
                continue;
            }
            let rest = sequence.unprocessed();
            // The last tokens of this prompt are in flight.
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
        self.add_prompts(step);
    }

    /// Fills the step with chunks of prompts.
    pub(super) fn plan_prompts(&mut self, step: &mut ScheduledStep) {
        let mut prompts = std::mem::take(&mut self.prompts);
        // Generation may have pre-empted some of them.
        prompts.retain(|(key, _)| self.get(*key).is_some_and(Sequence::runs));
        let mut left = self.capacity.tokens - step.tokens;
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
        self.add_prompts(step);
    }

    /// Adds the collected prompts to the step, each with its share of the tokens.
    fn add_prompts(&mut self, step: &mut ScheduledStep) {
        let prompts = std::mem::take(&mut self.prompts);
        for (key, share) in prompts.iter().copied() {
            // An earlier prompt may have pre-empted this one.
            if !self.get(key).is_some_and(Sequence::runs) {
                continue;
            }
            // An earlier prompt may have computed the same prefix.
            let found = self.find_prefix(key);
            let Some(sequence) = self.get(key) else { continue };
            if found > 0 {
                step.placed.push((key, sequence.computed));
            }
            let (from, end) = (sequence.computed, sequence.computed + share.min(sequence.unprocessed()));
            let tokens = self.grow(key, end, step).min(end).saturating_sub(from);
            if share > 0 && tokens > 0 {
                self.add_to_step(key, tokens, Some(from), step);
            }
        }
        self.prompts = prompts;
    }

    /// Adds drafts, in order, to the unused part of the step. No sequence is pre-empted for a draft, and one page stays
    /// reserved for each running sequence.
    pub(super) fn plan_drafts(&mut self, step: &mut ScheduledStep) {
        for index in 0..step.sequences.len() {
            let ScheduledSequence { key, tokens, samples, .. } = step.sequences[index];
            let Some(sequence) = self.get(key) else { continue };
            if samples == 0 || sequence.draft.is_empty() {
                continue;
            }
            let spare = self.pages.available().saturating_sub(self.active);
            let slots = (sequence.pages.len() + spare) * self.capacity.block_size;
            let computed = sequence.computed;
            let most = sequence.remaining().min(self.capacity.tokens - step.tokens).min(slots - computed);
            let count = sequence.draft.len().min(most);
            self.grow(key, computed + count, step);
            let Some(sequence) = self.get_mut(key) else { continue };
            sequence.draft.truncate(count);
            if count == 0 {
                continue;
            }
            sequence.computed += count;
            // After a draft only the host knows which tokens were accepted, so it sends the last one.
            sequence.device_has_last_token = false;
            let scheduled = &mut step.sequences[index];
            scheduled.from.get_or_insert(computed - tokens);
            scheduled.tokens += count;
            scheduled.samples += count;
            step.tokens += count;
        }
    }

    /// Adds tokens of a sequence to the step.
    fn add_to_step(
        &mut self,
        key: SequenceKey,
        tokens: usize,
        from: Option<usize>,
        step: &mut ScheduledStep,
    ) {
        let (number, tokens_from_host) = (self.step, self.capacity.tokens_from_host);
        let Some(sequence) = self.get_mut(key) else { return };
        sequence.last_step = number;
        sequence.computed += tokens;
        let samples = from.is_none() || sequence.computed == sequence.tokens.len();
        if samples {
            sequence.unread += 1;
            sequence.device_has_last_token = !tokens_from_host;
        }
        step.tokens += tokens;
        step.sequences.push(ScheduledSequence { key, tokens, from, samples: usize::from(samples) });
        self.identify_pages(key);
    }

    /// Allocates pages for the first `end` tokens of a sequence, and pre-empts later sequences if needed. Returns how many
    /// of these tokens have pages.
    fn grow(&mut self, key: SequenceKey, end: usize, step: &mut ScheduledStep) -> usize {
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
            match self.last_preemptible() {
                Some(last) if order < self.order(last) => self.preempt_last(step),
                _ => break,
            }
        }
        if count > before {
            step.grown.push((key, before));
        }
        (count * block).min(end)
    }
}
