//! Stored responses: the conversations that later requests continue, bounded in memory.

use crate::serve::{
    access::ClientId,
    api::{
        chat::{ChatMessage, Content},
        responses::ResponseObject,
    },
};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

/// The bytes that are counted for a message beside its texts.
const MESSAGE: usize = 512;

/// Responses that are kept until there are too many bytes of them: then the oldest are forgotten.
#[derive(Debug)]
pub(crate) struct ResponseStore {
    limit: usize,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    by_id: HashMap<String, Entry>,
    /// Ids in the order in which they came; some may have been deleted.
    order: VecDeque<String>,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    owner: Owner,
    bytes: usize,
    response: Arc<StoredResponse>,
}

/// Who may read a response: the holder of an API key, or anyone where there are none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Key(usize),
    Anyone,
}

impl Owner {
    fn of(client: ClientId) -> Self {
        match client {
            ClientId::Key(index) => Self::Key(index),
            // Addresses change, and several people share one.
            ClientId::Address(_) => Self::Anyone,
        }
    }
}

/// A response, with the conversation that led to it and its answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredResponse {
    pub(crate) conversation: Vec<ChatMessage>,
    pub(crate) response: ResponseObject,
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        let of_message = |message: &ChatMessage| {
            let content = message.content.as_ref().map_or(0, Content::bytes);
            let reasoning = message.reasoning_content.as_ref().map_or(0, String::len);
            let calls = message.tool_calls.iter().flatten();
            let calls: usize =
                calls.map(|call| call.function.name.len() + call.function.arguments.len() + MESSAGE).sum();
            MESSAGE + content + reasoning + calls
        };
        // Bodies consist of strings and numbers, so they can always be serialised.
        let response = serde_json::to_vec(&self.response).map_or(0, |body| body.len());
        self.conversation.iter().map(of_message).sum::<usize>() + 2 * response
    }
}

impl ResponseStore {
    /// A store of at most `limit` bytes; with 0 nothing is stored.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, entries: Mutex::default() }
    }

    /// Keeps a response. A response that is larger than the store is not kept.
    pub(crate) fn keep(&self, client: ClientId, response: StoredResponse) {
        let bytes = response.bytes();
        if bytes > self.limit {
            return;
        }
        let id = response.response.id.clone();
        let entry = Entry { owner: Owner::of(client), bytes, response: Arc::new(response) };
        let mut entries = self.lock();
        entries.bytes += bytes;
        entries.order.push_back(id.clone());
        if let Some(before) = entries.by_id.insert(id, entry) {
            entries.bytes -= before.bytes;
        }
        while entries.bytes > self.limit {
            let Some(oldest) = entries.order.pop_front() else { break };
            entries.remove(&oldest);
        }
    }

    /// The response of this id, if this client may read it.
    pub(crate) fn get(&self, client: ClientId, id: &str) -> Option<Arc<StoredResponse>> {
        let entries = self.lock();
        let entry = entries.by_id.get(id).filter(|entry| entry.owner == Owner::of(client))?;
        Some(entry.response.clone())
    }

    /// Forgets a response; returns whether there was one that this client may read.
    pub(crate) fn delete(&self, client: ClientId, id: &str) -> bool {
        let found = self.get(client, id).is_some();
        let mut entries = self.lock();
        if found {
            entries.remove(id);
            entries.order.retain(|known| known != id);
        }
        found
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn remove(&mut self, id: &str) {
        if let Some(entry) = self.by_id.remove(id) {
            self.bytes -= entry.bytes;
        }
    }
}
