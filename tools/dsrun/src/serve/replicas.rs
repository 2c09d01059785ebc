//! Several engines with the same model behind one door.
//!
//! A request goes to the engine that has seen the start of its prompt, whose cache then spares the work, unless that engine has
//! clearly more to do than the others; else to the one with the least to do.

use dsrun_engine::{
    EmbeddingRequest, Request, RequestLimits, Statistics,
    service::{Handle, PendingEmbedding, ServiceError, ServicePhase, TokenStream},
};
use futures_util::future::{join_all, select_all};
use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Mutex, PoisonError},
};

/// Tokens of the pieces in which prompts are compared.
const PIECE: usize = 64;
/// Pieces that are remembered. With more, those that were seen longest ago are forgotten.
const MAX_PIECES: usize = 65_536;
/// How many more requests an engine may have than the least busy one and still be given those it knows the start of.
const SLACK: usize = 4;

/// Engines with the same model and the same options; at least one.
#[derive(Debug)]
pub(crate) struct Replicas {
    engines: Vec<Handle>,
    seen: Mutex<Seen>,
}

impl Replicas {
    /// These engines. Nothing can be asked of none.
    pub(crate) fn new(engines: Vec<Handle>) -> Option<Self> {
        (!engines.is_empty()).then(|| Self { engines, seen: Mutex::default() })
    }

    /// Hands a request to one of them.
    ///
    /// # Errors
    /// As [`Handle::submit`].
    pub(crate) fn submit(&self, request: Request) -> Result<TokenStream, ServiceError> {
        self.choose(&request.prompt).submit(request)
    }

    /// Hands a request for a vector to one of them.
    ///
    /// # Errors
    /// As [`Handle::embed`].
    pub(crate) fn embed(&self, request: EmbeddingRequest) -> Result<PendingEmbedding, ServiceError> {
        self.choose(&request.tokens).embed(request)
    }

    /// The engine for a prompt.
    fn choose(&self, prompt: &[u32]) -> &Handle {
        let [engine] = self.engines.as_slice() else {
            let loads: Vec<usize> = self.engines.iter().map(load).collect();
            let chosen = self.seen.lock().unwrap_or_else(PoisonError::into_inner).choose(prompt, &loads);
            return &self.engines[chosen];
        };
        engine
    }

    /// What a request has to keep to.
    pub(crate) fn limits(&self) -> RequestLimits {
        self.engines[0].limits()
    }

    /// The tokens that end an answer.
    pub(crate) fn stop_ids(&self) -> &[u32] {
        self.engines[0].stop_ids()
    }

    /// What all of them counted together.
    pub(crate) fn statistics(&self) -> Statistics {
        let mut sum = Statistics::default();
        self.engines.iter().for_each(|engine| sum.add(&engine.statistics()));
        sum
    }

    /// Whether all of them take requests.
    pub(crate) fn is_running(&self) -> bool {
        self.engines.iter().all(|engine| engine.phase() == ServicePhase::Running)
    }

    /// From here on none takes requests; those they have are finished.
    pub(crate) fn drain(&self) {
        self.engines.iter().for_each(Handle::drain);
    }

    /// Waits until all have finished what they had.
    pub(crate) async fn drained(&self) {
        join_all(self.engines.iter().map(Handle::drained)).await;
    }

    /// Waits until one of them has ended, and says why.
    pub(crate) async fn ended(&self) -> ServiceError {
        let (_, index, _) = select_all(self.engines.iter().map(|engine| Box::pin(engine.stopped()))).await;
        self.engines[index].failure().unwrap_or(ServiceError::Stopped)
    }
}

/// What an engine has to do.
fn load(engine: &Handle) -> usize {
    let statistics = engine.statistics();
    statistics.running + statistics.waiting
}

/// Which engine has seen which start of a prompt.
#[derive(Debug, Default)]
struct Seen {
    /// By the hash of all tokens up to the end of a piece: the engine, and when it saw them last.
    pieces: HashMap<u64, (usize, u64)>,
    clock: u64,
}

impl Seen {
    /// Chooses an engine for a prompt, given what each has to do, and remembers the choice.
    fn choose(&mut self, prompt: &[u32], loads: &[usize]) -> usize {
        let mut hasher = DefaultHasher::new();
        let hash = |piece: &[u32]| {
            piece.hash(&mut hasher);
            hasher.finish()
        };
        let hashes: Vec<u64> = prompt.chunks_exact(PIECE).map(hash).collect();
        let known = hashes.iter().map_while(|hash| self.pieces.get(hash)).last().map(|seen| seen.0);
        let (least, least_load) =
            loads.iter().copied().enumerate().min_by_key(|(_, load)| *load).unwrap_or((0, 0));
        let chosen = known.filter(|known| loads[*known] <= least_load + SLACK).unwrap_or(least);
        self.clock += 1;
        if self.pieces.len() + hashes.len() > MAX_PIECES {
            self.forget();
        }
        // A prompt of more pieces than are remembered is remembered by its start.
        self.pieces.extend(hashes.into_iter().take(MAX_PIECES / 2).map(|hash| (hash, (chosen, self.clock))));
        chosen
    }

    /// Forgets the half that was seen longest ago.
    fn forget(&mut self) {
        let mut times: Vec<u64> = self.pieces.values().map(|seen| seen.1).collect();
        let middle = times.len() / 2;
        if let Some(median) = times.get(middle).is_some().then(|| *times.select_nth_unstable(middle).1) {
            self.pieces.retain(|_, seen| seen.1 > median);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(first: u32, tokens: usize) -> Vec<u32> {
        (0..tokens as u32).map(|index| first + index).collect()
    }

    #[test]
    fn what_is_not_known_goes_where_there_is_least_to_do() {
        let mut seen = Seen::default();
        assert_eq!(seen.choose(&prompt(0, 200), &[3, 1, 2]), 1);
        assert_eq!(seen.choose(&prompt(1000, 10), &[3, 1, 0]), 2);
    }

    #[test]
    fn what_starts_alike_goes_where_that_was_seen_unless_there_is_too_much_to_do() {
        let mut seen = Seen::default();
        assert_eq!(seen.choose(&prompt(0, 200), &[1, 0]), 1);
        // The first piece is the same, the rest is not.
        let mut alike = prompt(0, 64);
        alike.extend(prompt(5000, 100));
        assert_eq!(seen.choose(&alike, &[0, SLACK]), 1);
        assert_eq!(seen.choose(&alike, &[0, SLACK + 1]), 0);
        // From here on the other knows it, too.
        assert_eq!(seen.choose(&alike, &[0, 0]), 0);
        // A start shorter than a piece is not known.
        assert_eq!(seen.choose(&prompt(0, 63), &[1, 0]), 1);
    }

    #[test]
    fn memory_is_bounded() {
        let mut seen = Seen::default();
        for first in 0..1000 {
            seen.choose(&prompt(first, 200 * PIECE), &[0, 0]);
            assert!(seen.pieces.len() <= MAX_PIECES);
        }
        seen.choose(&prompt(7, 2 * MAX_PIECES * PIECE), &[0, 0]);
        assert!(seen.pieces.len() <= MAX_PIECES);
    }
}
