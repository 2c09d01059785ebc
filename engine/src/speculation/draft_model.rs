//! A second model that proposes tokens: an engine of its own on the same device, with a KV cache of its own.
//!
//! It has a sequence for each request that speculates. A round brings these up to date with the tokens that have come, and
//! samples up to so many more behind each, all in the same steps. What is sampled is a guess: with the next round the sequence
//! goes back to where the guess was right, and what follows in its cache is written over. Prompts are processed by the same
//! steps, chunk by chunk over several rounds if they are long, so that a round never holds up others for longer than as many
//! steps of the second model.
//!
//! A guess is drawn with the request's own sampling options, seed and position. Draws of equal seed and position choose by the
//! same random numbers (Gumbel-max), so two models that think alike draw the same token at any temperature.

use crate::engine::{Engine, Running};
use crate::{
    error::Result,
    request::RequestId,
    schedule::{Entry, Key, Scheduler, Sequence},
    statistics::Phase,
};
use std::{collections::HashMap, time::Instant};

/// Proposes tokens with a model of its own.
#[derive(Debug)]
pub(crate) struct Drafter {
    engine: Box<Engine>,
    /// The most tokens proposed at a time.
    tokens: usize,
    /// Its sequences, by those they follow.
    sequences: HashMap<Key, Key>,
    /// Those whose tokens have come since the last round, and how many to propose for each.
    wanted: Vec<(Key, usize)>,
    /// Pre-emptions of the engine it proposes for, as of the last round.
    preemptions: u64,
}

impl Running {
    /// What draws guesses as this request would draw tokens, among those that a vocabulary has.
    fn guessing(&self, id: RequestId, vocabulary: usize) -> Self {
        Self {
            id,
            limit: usize::MAX,
            sampling: self.sampling.clone(),
            stop_ids: Vec::new(),
            ignore_end: true,
            min_tokens: 0,
            bias: self.bias.iter().filter(|(token, _)| (*token as usize) < vocabulary).copied().collect(),
            top: 0,
            constraint: None,
            pooler: None,
            proposer: None,
        }
    }
}

impl Drafter {
    /// Proposes up to `tokens` at a time by running an engine that nobody else uses.
    pub(crate) fn new(engine: Engine, tokens: usize) -> Self {
        Self {
            engine: Box::new(engine),
            tokens,
            sequences: HashMap::new(),
            wanted: Vec::new(),
            preemptions: 0,
        }
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Notes that tokens of a request have come, for which the next round is to propose up to `tokens` more.
    pub(crate) fn want(&mut self, key: Key, tokens: usize) {
        self.wanted.push((key, tokens));
    }

    /// Forgets a request; its pages are free at once.
    pub(crate) fn release(&mut self, key: Key) {
        let own = self.sequences.remove(&key);
        if let Some(id) = own.and_then(|own| self.engine.scheduler.get(own)).map(|own| own.item.id) {
            self.engine.end(id);
        }
    }

    /// A round: proposes tokens for those that want some. One whose prompt is still processed gets fewer, or none.
    fn propose(&mut self, scheduler: &mut Scheduler<Running>, vocabulary: usize) -> Result<()> {
        let preemptions = scheduler.counts().preemptions;
        if preemptions != self.preemptions {
            self.preemptions = preemptions;
            let waits = |key: &&Key| !scheduler.get(**key).is_some_and(Sequence::runs);
            let waiting: Vec<Key> = self.sequences.keys().filter(waits).copied().collect();
            waiting.into_iter().for_each(|key| self.release(key));
        }
        let wanted = std::mem::take(&mut self.wanted);
        // What would find no place in a step is not worth a step to propose.
        let most = scheduler.room().checked_div(wanted.len()).unwrap_or(0).min(self.tokens);
        if most == 0 {
            return Ok(());
        }
        for (key, tokens) in &wanted {
            if let Some(sequence) = scheduler.get(*key).filter(|sequence| sequence.runs()) {
                self.follow(*key, sequence, most.min(*tokens));
            }
        }
        self.engine.run_steps(most)?;
        // One that has no token to sample is at its end here; the request is told by its own model.
        self.engine.take_failures();
        for (key, most) in wanted.into_iter().map(|(key, tokens)| (key, most.min(tokens))) {
            let Some(own) = self.sequences.get(&key).and_then(|own| self.engine.scheduler.get(*own)) else {
                continue;
            };
            let known = |token: &&i32| usize::try_from(**token).is_ok_and(|token| token < vocabulary);
            let guessed = own.tokens.iter().skip(own.prompt).take(most).take_while(known);
            if let Some(sequence) = scheduler.get_mut(key) {
                sequence.draft = guessed.copied().collect();
            }
        }
        Ok(())
    }

    /// Brings the sequence of a request up to date, to sample up to `most` tokens behind it.
    fn follow(&mut self, key: Key, sequence: &Sequence<Running>, most: usize) {
        let engine = &mut *self.engine;
        let (tokens, limits) = (&sequence.tokens, engine.limits());
        // Behind tokens under way nothing can be proposed. One makes the request wait until they are read.
        let most = if sequence.unread > 0 { 1 } else { most };
        // The last token of an answer is not checked: nothing comes behind it.
        let limit = most.min(sequence.left().saturating_sub(1));
        let length = tokens.len() + limit;
        let fits = length <= limits.context.min(limits.pages * limits.block_size);
        let known = |token: &i32| usize::try_from(*token).is_ok_and(|token| token < limits.vocabulary);
        if limit == 0 || !fits || !tokens.iter().all(known) {
            return self.release(key);
        }
        let own = self.sequences.get(&key).copied();
        if let Some(own) = own.and_then(|own| engine.scheduler.get_mut(own)) {
            return own.resume(tokens, limit);
        }
        let id = engine.ids.next();
        let own = engine.scheduler.add(Entry {
            prompt: tokens.clone(),
            limit,
            priority: sequence.priority,
            waits: false,
            whole: false,
            guesses: true,
            item: sequence.item.guessing(id, limits.vocabulary),
        });
        engine.keys.insert(id, own);
        self.sequences.insert(key, own);
    }
}

impl Engine {
    /// The engine of the second model that proposes tokens for this one, if there is one.
    pub fn draft(&self) -> Option<&Self> {
        self.drafter.as_ref().map(Drafter::engine)
    }

    /// Has the second model propose tokens behind those that have come.
    pub(crate) fn propose(&mut self) -> Result<()> {
        let Some(drafter) = self.drafter.as_mut().filter(|drafter| !drafter.wanted.is_empty()) else {
            return Ok(());
        };
        let start = Instant::now();
        drafter.propose(&mut self.scheduler, self.vocabulary)?;
        self.took(Phase::Draft, start);
        Ok(())
    }
}
