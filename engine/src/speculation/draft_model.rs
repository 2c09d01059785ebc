//! A draft model: a second, smaller model on the same device that proposes tokens, with its own KV cache.
//!
//! It has a sequence for each request that speculates. A round brings these up to date with the request's new tokens, and samples
//! more tokens after them, all sequences in the same steps. Sampled tokens are provisional: with the next round a sequence goes
//! back to where they agree with the request, and the cache after that is overwritten. Prompts are processed by the same steps,
//! in chunks over several rounds if they are long, so a round never delays other requests by more than its own steps.
//!
//! A token is drawn with the request's own sampling options, seed and position. Draws of equal seed and position use the same
//! random numbers (Gumbel-max), so two models with similar probabilities draw the same token at any temperature.

use crate::{
    error::Result,
    runner::{ActiveRequest, RequestSequence, Runner},
    schedule::{NewSequence, Scheduler, SequenceKey},
};
use std::collections::HashMap;

/// Proposes tokens with a model of its own.
#[derive(Debug)]
pub(crate) struct DraftModel {
    runner: Runner,
    /// The most tokens proposed at a time.
    tokens: usize,
    /// Its own sequences, by those of the requests that they follow.
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

    /// As [`Self::runner`].
    pub(crate) fn runner_mut(&mut self) -> &mut Runner {
        &mut self.runner
    }

    /// Whether the next round has anything to propose.
    pub(super) fn has_requests(&self) -> bool {
        !self.requested.is_empty()
    }

    /// Requests up to `tokens` proposed tokens for a sequence in the next round.
    pub(super) fn request(&mut self, key: SequenceKey, tokens: usize) {
        self.requested.push((key, tokens));
    }

    /// Ends the sequence that follows a request. Its pages are free at once.
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
        // A sequence without a token to sample just ends here; its request gets the error from its own model.
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

    /// Brings the sequence that follows a request up to date, to sample up to `most` tokens after it.
    fn follow(&mut self, key: SequenceKey, sequence: &RequestSequence, most: usize) {
        let (tokens, limits) = (&sequence.tokens, self.runner.limits());
        // After tokens in flight nothing can be proposed. One token makes the request wait until they are read.
        let most = if sequence.unread > 0 { 1 } else { most };
        // The last token of an answer is not checked, because no token follows it.
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
