//! The requests of a runner: their ids, their sequences, and the results that callers have yet to collect.

use super::active_request::ActiveRequest;
use crate::{
    error::EngineError,
    request::{RequestId, RequestIds},
    schedule::{NewSequence, Scheduler, Sequence, SequenceKey},
};
use std::collections::HashMap;

/// The requests that have not ended, and results that callers have yet to collect.
#[derive(Debug)]
pub(crate) struct Requests {
    scheduler: Scheduler<ActiveRequest>,
    /// The sequence of each request that has not ended.
    keys: HashMap<RequestId, SequenceKey>,
    ids: RequestIds,
    /// Requests that could not continue, and why.
    failures: Vec<(RequestId, EngineError)>,
    /// Finished embeddings.
    embeddings: Vec<(RequestId, Vec<f32>)>,
    /// Sequences of requests that speculated and have ended.
    ended_speculation: Vec<SequenceKey>,
    /// The model's tokens that end an answer.
    stop_ids: Vec<u32>,
    /// The number of tokens the model knows.
    vocabulary: usize,
}

impl Requests {
    /// No requests.
    pub(super) fn new(scheduler: Scheduler<ActiveRequest>, stop_ids: Vec<u32>, vocabulary: usize) -> Self {
        Self {
            scheduler,
            keys: HashMap::new(),
            ids: RequestIds::default(),
            failures: Vec::new(),
            embeddings: Vec::new(),
            ended_speculation: Vec::new(),
            stop_ids,
            vocabulary,
        }
    }

    /// The source of request ids.
    pub(crate) fn ids(&self) -> &RequestIds {
        &self.ids
    }

    /// A new request id.
    pub(crate) fn next_id(&self) -> RequestId {
        self.ids.next()
    }

    /// The model's tokens that end an answer.
    pub(crate) fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The number of tokens the model knows.
    pub(crate) fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The scheduler of the requests' sequences.
    pub(crate) fn scheduler(&self) -> &Scheduler<ActiveRequest> {
        &self.scheduler
    }

    /// Same as [`Self::scheduler`].
    pub(crate) fn scheduler_mut(&mut self) -> &mut Scheduler<ActiveRequest> {
        &mut self.scheduler
    }

    /// The scheduler and the model's tokens that end an answer.
    pub(super) fn scheduler_and_stop_ids(&mut self) -> (&mut Scheduler<ActiveRequest>, &[u32]) {
        (&mut self.scheduler, &self.stop_ids)
    }

    /// Queues a request.
    pub(crate) fn add(&mut self, new: NewSequence<ActiveRequest>) -> SequenceKey {
        let id = new.item.id;
        let key = self.scheduler.add(new);
        self.keys.insert(id, key);
        key
    }

    /// Whether a request that has not ended has ever run.
    pub(crate) fn has_started(&self, id: RequestId) -> bool {
        let sequence = self.keys.get(&id).and_then(|key| self.scheduler.get(*key));
        sequence.is_some_and(Sequence::has_started)
    }

    /// Ends a request. Returns whether it had not ended before.
    pub(super) fn end(&mut self, id: RequestId) -> bool {
        let Some(key) = self.keys.remove(&id) else { return false };
        if self.scheduler.end(key).is_some_and(|request| request.speculates) {
            self.ended_speculation.push(key);
        }
        true
    }

    /// Keeps the error of a request that could not continue.
    pub(super) fn add_failure(&mut self, id: RequestId, error: EngineError) {
        self.failures.push((id, error));
    }

    /// Keeps a finished embedding.
    pub(super) fn add_embedding(&mut self, id: RequestId, embedding: Vec<f32>) {
        self.embeddings.push((id, embedding));
    }

    /// Takes the errors of requests that could not continue.
    pub(crate) fn take_failures(&mut self) -> Vec<(RequestId, EngineError)> {
        std::mem::take(&mut self.failures)
    }

    /// Takes the finished embeddings.
    pub(crate) fn take_embeddings(&mut self) -> Vec<(RequestId, Vec<f32>)> {
        std::mem::take(&mut self.embeddings)
    }

    /// Takes the sequences of requests that speculated and have ended.
    pub(crate) fn take_ended_speculation(&mut self) -> Vec<SequenceKey> {
        std::mem::take(&mut self.ended_speculation)
    }
}
