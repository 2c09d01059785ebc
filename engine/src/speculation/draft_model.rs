//! A draft model: a second, smaller model on the same device that proposes tokens, with its own KV cache.
//!
//! It keeps one sequence per speculating request. A round appends the request's new tokens to its sequence and samples more
//! tokens after them, with all sequences batched into the same steps. Sampled tokens are provisional: in the next round a
//! sequence is cut back to its common prefix with the request, and the KV cache after it is overwritten. Prompts are processed by
//! the same steps, in chunks over several rounds if they are long, so a round delays other requests by at most its own steps.
//!
//! Tokens are sampled with the request's own sampling options, seed and position. Equal seeds and positions use the same
//! Gumbel noise, so two models with similar probabilities tend to sample the same token at any temperature.

use crate::{
    error::Result,
    runner::{ActiveRequest, RequestSequence, Runner},
    schedule::{NewSequence, Scheduler, SequenceKey},
};
use std::collections::HashMap;

/// Drafts tokens with a second model.
#[derive(Debug)]
pub(crate) struct DraftModel {
    runner: Runner,
    /// The maximum number of tokens per draft.
    tokens: usize,
    /// The draft model's sequences, by the request's sequence that each follows.
    sequences: HashMap<SequenceKey, SequenceKey>,
    /// The requests of the next round, and how many tokens to propose for each.
    requested: Vec<(SequenceKey, usize)>,
    /// The engine's count of pre-emptions at the last round.
    preemptions: u64,
}

impl DraftModel {
    /// Proposes up to `tokens` tokens at a time with a runner of its own.
    pub(crate) fn new(runner: Runner, tokens: usize) -> Self {
        Self { runner, tokens, sequences: HashMap::new(), requested: Vec::new(), preemptions: 0 }
    }

    /// The draft model's runner.
    pub(crate) fn runner(&self) -> &Runner {
        &self.runner
    }

    /// Same as [`Self::runner`].
    pub(crate) fn runner_mut(&mut self) -> &mut Runner {
        &mut self.runner
    }

    /// Whether the next round has anything to propose.
    pub(super) fn has_requests(&self) -> bool {
        !self.requested.is_empty()
    }

    /// Queues a sequence for the next round, with a draft of up to `tokens` tokens.
    pub(super) fn request(&mut self, key: SequenceKey, tokens: usize) {
        self.requested.push((key, tokens));
    }

    /// Ends the draft model's sequence of a request, and frees its pages.
    pub(super) fn release(&mut self, key: SequenceKey) {
        if let Some(own) = self.sequences.remove(&key) {
            self.runner.end_sequence(own);
        }
    }

    /// Runs a round: proposes tokens for the sequences of `scheduler` that were requested. A sequence whose prompt is still being
    /// processed gets fewer tokens, or none.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn propose(
        &mut self,
        scheduler: &mut Scheduler<ActiveRequest>,
        vocabulary: usize,
    ) -> Result<()> {
        let preemptions = scheduler.counts().preemptions;
        if preemptions != self.preemptions {
            self.preemptions = preemptions;
            let waits = |key: &&SequenceKey| !scheduler.get(**key).is_some_and(RequestSequence::runs);
            let waiting: Vec<SequenceKey> = self.sequences.keys().filter(waits).copied().collect();
            waiting.into_iter().for_each(|key| self.release(key));
        }
        let requested = std::mem::take(&mut self.requested);
        // Tokens that would not fit into the next step are not worth proposing.
        let most = scheduler.spare_tokens().checked_div(requested.len()).unwrap_or(0).min(self.tokens);
        if most == 0 {
            return Ok(());
        }
        for (key, tokens) in &requested {
            if let Some(sequence) = scheduler.get(*key).filter(|sequence| sequence.runs()) {
                self.follow(*key, sequence, most.min(*tokens));
            }
        }
        self.runner.run_steps(most)?;
        // If a sequence fails because no token can be sampled, it just ends here; the target model reports the error to the
        // request.
        self.runner.requests_mut().take_failures();
        for (key, most) in requested.into_iter().map(|(key, tokens)| (key, most.min(tokens))) {
            let own = self.sequences.get(&key);
            let Some(own) = own.and_then(|own| self.runner.requests().scheduler().get(*own)) else {
                continue;
            };
            let known = |token: &&i32| usize::try_from(**token).is_ok_and(|token| token < vocabulary);
            let proposed = own.tokens.iter().skip(own.prompt).take(most).take_while(known);
            if let Some(sequence) = scheduler.get_mut(key) {
                sequence.draft = proposed.copied().collect();
            }
        }
        Ok(())
    }

    /// Updates the draft model's sequence of a request to the request's tokens, to sample up to `most` tokens after them.
    fn follow(&mut self, key: SequenceKey, sequence: &RequestSequence, most: usize) {
        let (tokens, limits) = (&sequence.tokens, self.runner.limits());
        // A draft must follow tokens that the host has read. While some are in flight, draft a single token, which makes the
        // request wait until they are read.
        let most = if sequence.unread > 0 { 1 } else { most };
        // A draft for the last token of an answer is useless, because no step follows in which to verify it.
        let limit = most.min(sequence.remaining().saturating_sub(1));
        let length = tokens.len() + limit;
        let fits = length <= limits.context.min(limits.pages * limits.block_size);
        let known = |token: &i32| usize::try_from(*token).is_ok_and(|token| token < limits.vocabulary);
        if limit == 0 || !fits || !tokens.iter().all(known) {
            return self.release(key);
        }
        let requests = self.runner.requests_mut();
        let own = self.sequences.get(&key).copied();
        if let Some(own) = own.and_then(|own| requests.scheduler_mut().get_mut(own)) {
            return own.resume(tokens, limit);
        }
        let id = requests.next_id();
        let root = requests.scheduler().pages().root(sequence.item.cache_salt.as_deref());
        let own = requests.add(NewSequence {
            prompt: tokens.clone(),
            limit,
            priority: sequence.priority,
            waits_for_host: false,
            reuses_prefix: true,
            root,
            provisional: true,
            item: sequence.item.draft(id, limits.vocabulary),
        });
        self.sequences.insert(key, own);
    }
}
