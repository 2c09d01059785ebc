//! Speculation: tokens are proposed cheaply, and the model checks several of them in one step.
//!
//! A step with proposed tokens after a request's last token samples at each of these positions. A draw depends only on the tokens
//! before it, on the seed and on the position, so as long as each draw equals the proposed token, the next draw is the one that
//! would have come anyway. Tokens after the first difference are dropped. The answer is the same, greedy or sampled; only the
//! number of steps depends on the quality of the proposals.

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
    /// The proposer of each request that has had a token.
    proposers: HashMap<SequenceKey, Proposer>,
    /// The draft model, if the options ask for one.
    draft: Option<DraftModel>,
}

/// Proposes tokens for one request.
#[derive(Debug)]
enum Proposer {
    /// Proposes from the request's own prompt and answer.
    Lookup(PromptLookup),
    /// Decides how many tokens the draft model is asked for.
    Draft(DraftLength),
}

impl Speculator {
    /// Proposes tokens as the option says, with a draft model if it names one.
    pub(crate) fn new(speculation: Speculation, draft: Option<DraftModel>) -> Self {
        Self { speculation, proposers: HashMap::new(), draft }
    }

    /// The draft model, if there is one.
    pub(crate) fn draft(&self) -> Option<&DraftModel> {
        self.draft.as_ref()
    }

    /// As [`Self::draft`].
    pub(crate) fn draft_mut(&mut self) -> Option<&mut DraftModel> {
        self.draft.as_mut()
    }

    /// Has the draft model propose tokens for the requests that got tokens in the last step. This runs before the next step and
    /// not when tokens arrive, so that it does not delay their delivery.
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

    /// Learns how many proposed tokens were accepted in a completed step, and proposes more or asks the draft model for them.
    pub(crate) fn learn(&mut self, runner: &mut Runner) {
        for outcome in runner.take_draft_outcomes() {
            let Some(sequence) = runner.requests_mut().scheduler_mut().get_mut(outcome.key) else { continue };
            let proposer =
                self.proposers.entry(outcome.key).or_insert_with(|| Proposer::new(self.speculation));
            if outcome.proposed > 0 {
                proposer.learn(outcome.proposed, outcome.accepted);
            }
            // Until then, end tokens may not be sampled, and the mask for it differs from row to row.
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

    /// Forgets the requests that have ended. Their pages in the draft model's cache are free at once.
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
