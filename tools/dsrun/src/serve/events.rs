//! Answers as server-sent events; ids and times of responses.

use super::{
    api::Usage,
    error::ApiError,
    generation::{Answers, Piece},
};
use axum::{
    http::{HeaderValue, header},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::stream;
use serde::Serialize;
use std::{
    collections::VecDeque,
    convert::Infallible,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The interval of comments that keep an idle connection alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Writes the events of a stream.
pub(crate) trait Script: Send + 'static {
    /// Whether the stream ends with `[DONE]`, unless it ends with an error.
    const ENDS_WITH_DONE: bool;

    /// The events before the first piece.
    fn open(&mut self, usage: Usage) -> Vec<Event>;

    /// The events of a piece.
    fn piece(&mut self, piece: Piece) -> Vec<Event>;

    /// The events after the last piece, when all answers are complete.
    fn close(&mut self, usage: Usage) -> Vec<Event>;

    /// The events of an error, which are the last ones.
    fn fail(&mut self, error: &ApiError) -> Vec<Event>;
}

/// Streams answers as a script writes them.
pub(crate) fn stream<S: Script>(answers: Answers, mut script: S) -> Response {
    let ready = script.open(answers.usage()).into();
    let state = Stream { answers, script, ready, done: false };
    let events = stream::unfold(state, |mut state| async move {
        let event = state.next().await?;
        Some((Ok::<_, Infallible>(event), state))
    });
    let mut response = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    // Keeps proxies from buffering the answer.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

struct Stream<S> {
    answers: Answers,
    script: S,
    ready: VecDeque<Event>,
    done: bool,
}

impl<S: Script> Stream<S> {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.done {
                return None;
            }
            match self.answers.next().await {
                Some(Ok(piece)) => self.ready.extend(self.script.piece(piece)),
                Some(Err(error)) => {
                    self.done = true;
                    self.ready.extend(self.script.fail(&error));
                }
                None => {
                    self.done = true;
                    self.ready.extend(self.script.close(self.answers.usage()));
                    if S::ENDS_WITH_DONE {
                        self.ready.push_back(Event::default().data("[DONE]"));
                    }
                }
            }
        }
    }
}

/// An event with a value as JSON, which has no line breaks and so is one line.
pub(crate) fn event(name: Option<&str>, value: &impl Serialize) -> Event {
    let event = name.map_or_else(Event::default, |name| Event::default().event(name));
    // Bodies consist of strings and numbers, so they can always be serialised.
    event.data(serde_json::to_string(value).unwrap_or_default())
}

/// A unique id of a response.
pub(crate) fn id(kind: &str) -> String {
    format!("{kind}-{:032x}", rand::random::<u128>())
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
