//! Speculative decoding: a cheap proposer drafts tokens, and the model verifies several of them in one step.
//!
//! The proposed tokens follow a request's last token in a step, which samples at each of these positions. A sample depends only
//! on the tokens before it, the seed and the position. So as long as each sample equals the proposed token, the next one is the
//! token that decoding without speculation would sample. Tokens after the first mismatch are dropped. The answer is the same,
//! greedy or sampled; only the number of steps depends on the quality of the drafts.

mod draft_length;
mod draft_model;
mod prompt_lookup;

use crate::{error::Result, options::Speculation, runner::Runner, schedule::SequenceKey, statistics::Phase};
use draft_length::DraftLength;
pub(crate) use draft_model::DraftModel;
use prompt_lookup::PromptLookup;
use std::{collections::HashMap, time::Instant};

/// Proposes tokens for the requests of a runner.
#[derive(Debug)]
pub(crate) struct Speculator {
    speculation: Speculation,
    /// The proposer of each request that has generated a token.
    proposers: HashMap<SequenceKey, Proposer>,
    /// The draft model, if the options ask for one.
    draft: Option<DraftModel>,
}

/// Proposes tokens for one request.
#[derive(Debug)]
enum Proposer {
    /// Proposes from the request's own prompt and answer.
    Lookup(PromptLookup),
    /// Chooses how many tokens to request from the draft model.
    Draft(DraftLength),
}

impl Speculator {
    /// Makes a speculator for the option; `draft` is the draft model, if the option uses one.
    pub(crate) fn new(speculation: Speculation, draft: Option<DraftModel>) -> Self {
        Self { speculation, proposers: HashMap::new(), draft }
    }

    /// The draft model, if there is one.
    pub(crate) fn draft(&self) -> Option<&DraftModel> {
        self.draft.as_ref()
    }

    /// Same as [`Self::draft`].
    pub(crate) fn draft_mut(&mut self) -> Option<&mut DraftModel> {
        self.draft.as_mut()
    }

    /// Runs the draft model for the requests that got tokens in the last step. It runs right before the next step, not when
    /// tokens arrive, so that it does not delay their delivery.
    ///
    /// # Errors
    /// If the device failed.
    pub(crate) fn propose(&mut self, runner: &mut Runner) -> Result<()> {
        let Some(draft) = self.draft.as_mut().filter(|draft| draft.has_requests()) else { return Ok(()) };
        let start = Instant::now();
        let vocabulary = runner.requests().vocabulary();
        draft.propose(runner.requests_mut().scheduler_mut(), vocabulary)?;
        runner.record_phase(Phase::Draft, start);
        Ok(())
    }

    /// Adapts draft lengths to the tokens accepted in the completed steps, then drafts by prompt lookup or queues a request to
    /// the draft model.
    pub(crate) fn learn(&mut self, runner: &mut Runner) {
        for outcome in runner.take_draft_outcomes() {
            let Some(sequence) = runner.requests_mut().scheduler_mut().get_mut(outcome.key) else { continue };
            let proposer =
                self.proposers.entry(outcome.key).or_insert_with(|| Proposer::new(self.speculation));
            if outcome.proposed > 0 {
                proposer.learn(outcome.proposed, outcome.accepted);
            }
            // Before `min_tokens` tokens, the mask that forbids end tokens would differ between the rows of a draft.
            if sequence.generated() < sequence.item.min_tokens {
                continue;
            }
            match proposer {
                Proposer::Lookup(lookup) => sequence.draft = lookup.propose(&sequence.tokens),
                Proposer::Draft(length) => {
                    let tokens = length.next();
                    if let Some(draft) = self.draft.as_mut().filter(|_| tokens > 0) {
                        draft.request(outcome.key, tokens);
                    }
                }
            }
        }
        self.forget_ended(runner);
    }

    /// Drops the state of requests that have ended, and frees their pages in the draft model's KV cache.
    pub(crate) fn forget_ended(&mut self, runner: &mut Runner) {
        for key in runner.requests_mut().take_ended_speculation() {
            self.proposers.remove(&key);
            if let Some(draft) = &mut self.draft {
                draft.release(key);
            }
        }
    }
}

impl Proposer {
    fn new(speculation: Speculation) -> Self {
        match speculation {
            Speculation::Ngram { tokens } => Self::Lookup(PromptLookup::new(tokens)),
            Speculation::Draft { tokens } => Self::Draft(DraftLength::new(tokens)),
        }
    }

    fn learn(&mut self, proposed: usize, accepted: usize) {
        match self {
            Self::Lookup(lookup) => lookup.learn(proposed, accepted),
            Self::Draft(length) => length.learn(proposed, accepted),
        }
    }
}
