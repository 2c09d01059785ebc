//! Replicas: several engines with the same model.
//!
//! A request goes to the engine that has processed the beginning of its prompt before, whose cache then saves work, unless that
//! engine is clearly busier than the others; otherwise it goes to the least busy engine.

use dsrun_engine::{
    EmbeddingRequest, Request, RequestLimits, Statistics,
    service::{Admission, Handle, PendingEmbedding, ServiceError, ServicePhase, TokenStream},
};
use futures_util::future::{join_all, select_all};
use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Mutex, PoisonError},
};

/// Tokens of the pieces that prompts are compared by.
const PIECE: usize = 64;
/// The most pieces that are remembered. Beyond it, those seen longest ago are forgotten.
const MAX_PIECES: usize = 65_536;
/// The most requests that an engine may have above the least busy one to still get requests whose prompts it knows.
const SLACK: usize = 4;

/// Engines with the same model and the same options; at least one.
#[derive(Debug)]
pub(crate) struct Replicas {
    engines: Vec<Handle>,
    seen: Mutex<Seen>,
}

impl Replicas {
    /// These engines; `None` if there are none.
    pub(crate) fn new(engines: Vec<Handle>) -> Option<Self> {
        (!engines.is_empty()).then(|| Self { engines, seen: Mutex::default() })
    }

    /// Submits a request to one of the engines.
    ///
    /// # Errors
    /// As [`Handle::submit`].
    pub(crate) fn submit(&self, request: Request) -> Result<TokenStream, ServiceError> {
        self.choose(&request.prompt).submit(request)
    }

    /// Admits a request of several embeddings to every engine that has room.
    ///
    /// # Errors
    /// As [`Handle::admit`], if no engine has room.
    pub(crate) fn admit(&self) -> Result<Admissions, ServiceError> {
        let admitted: Vec<_> = self.engines.iter().map(Handle::admit).collect();
        if admitted.iter().all(Result::is_err) {
            // There is at least one engine.
            return Err(admitted.into_iter().find_map(Result::err).unwrap_or(ServiceError::Stopped));
        }
        Ok(Admissions { engines: admitted.into_iter().map(Result::ok).collect() })
    }

    /// Chooses the engine for a prompt.
    fn choose(&self, prompt: &[u32]) -> &Handle {
        &self.engines[self.chosen(prompt)]
    }

    fn chosen(&self, prompt: &[u32]) -> usize {
        if self.engines.len() == 1 {
            return 0;
        }
        let loads: Vec<usize> = self.engines.iter().map(load).collect();
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).choose(prompt, &loads)
    }

    /// The limits that a request has to keep to.
    pub(crate) fn limits(&self) -> RequestLimits {
        self.engines[0].limits()
    }

    /// The tokens that end an answer.
    pub(crate) fn stop_ids(&self) -> &[u32] {
        self.engines[0].stop_ids()
    }

    /// The sum of the engines' statistics.
    pub(crate) fn statistics(&self) -> Statistics {
        let mut sum = Statistics::default();
        self.engines.iter().for_each(|engine| sum.add(&engine.statistics()));
        sum
    }

    /// Whether all engines accept requests.
    pub(crate) fn is_running(&self) -> bool {
        self.engines.iter().all(|engine| engine.phase() == ServicePhase::Running)
    }

    /// Refuses requests from here on; the engines finish those they have.
    pub(crate) fn drain(&self) {
        self.engines.iter().for_each(Handle::drain);
    }

    /// Waits until all engines have finished their requests.
    pub(crate) async fn drained(&self) {
        join_all(self.engines.iter().map(Handle::drained)).await;
    }

    /// Waits until one of the engines has ended, and returns the reason.
    pub(crate) async fn ended(&self) -> ServiceError {
        let (_, index, _) = select_all(self.engines.iter().map(|engine| Box::pin(engine.stopped()))).await;
        self.engines[index].failure().unwrap_or(ServiceError::Stopped)
    }
}

/// The admission of a request of several embeddings, by engine.
#[derive(Debug)]
pub(crate) struct Admissions {
    engines: Vec<Option<Admission>>,
}

impl Admissions {
    /// Submits one of the embeddings to one of the engines.
    ///
    /// # Errors
    /// As [`Admission::embed`].
    pub(crate) fn embed(
        &self,
        replicas: &Replicas,
        request: EmbeddingRequest,
    ) -> Result<PendingEmbedding, ServiceError> {
        let chosen = self.engines.get(replicas.chosen(&request.tokens)).and_then(Option::as_ref);
        let admission = chosen.or_else(|| self.engines.iter().flatten().next());
        admission.ok_or(ServiceError::Stopped)?.embed(request)
    }
}

/// The number of requests of an engine.
fn load(engine: &Handle) -> usize {
    let statistics = engine.statistics();
    statistics.running + statistics.waiting
}

/// The engine that has processed each known beginning of a prompt.
#[derive(Debug, Default)]
struct Seen {
    /// By the hash of all tokens up to the end of a piece: the engine, and the time of its last request with them.
    pieces: HashMap<u64, (usize, u64)>,
    clock: u64,
}

impl Seen {
    /// Chooses an engine for a prompt, given the load of each, and remembers the choice.
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
        // A prompt of more pieces than are remembered is remembered by its beginning.
        self.pieces.extend(hashes.into_iter().take(MAX_PIECES / 2).map(|hash| (hash, (chosen, self.clock))));
        chosen
    }

    /// Forgets the half of the pieces that was seen longest ago.
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
    fn unknown_prompts_go_to_the_least_busy_engine() {
        let mut seen = Seen::default();
        assert_eq!(seen.choose(&prompt(0, 200), &[3, 1, 2]), 1);
        assert_eq!(seen.choose(&prompt(1000, 10), &[3, 1, 0]), 2);
    }

    #[test]
    fn known_prefixes_go_to_their_engine_unless_it_is_too_busy() {
        let mut seen = Seen::default();
        assert_eq!(seen.choose(&prompt(0, 200), &[1, 0]), 1);
        // The first piece is the same, the rest differs.
        let mut alike = prompt(0, 64);
        alike.extend(prompt(5000, 100));
        assert_eq!(seen.choose(&alike, &[0, SLACK]), 1);
        assert_eq!(seen.choose(&alike, &[0, SLACK + 1]), 0);
        // From here on the other engine knows it, too.
        assert_eq!(seen.choose(&alike, &[0, 0]), 0);
        // A prefix shorter than a piece is not known.
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
