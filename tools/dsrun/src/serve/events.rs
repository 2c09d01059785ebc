//! Answers as server-sent events; ids and times of responses.

use super::{
    api::Usage,
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

/// An update of the answers to a request.
pub(crate) enum Update {
    /// A piece of an answer.
    Piece(Piece),
    /// All answers are complete and used these tokens.
    Usage(Usage),
}

/// Streams answers: `write` turns each update into events, which are sent as JSON. The stream ends with `[DONE]`, or with an error.
pub(crate) fn stream<T: Serialize>(
    answers: Answers,
    include_usage: bool,
    write: impl FnMut(Update) -> Vec<T> + Send + 'static,
) -> Response {
    let state = Stream { answers, include_usage, write, ready: VecDeque::new(), done: false };
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

struct Stream<W> {
    answers: Answers,
    include_usage: bool,
    write: W,
    ready: VecDeque<Event>,
    done: bool,
}

impl<T: Serialize, W: FnMut(Update) -> Vec<T>> Stream<W> {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.done {
                return None;
            }
            match self.answers.next().await {
                Some(Ok(piece)) => {
                    let values = (self.write)(Update::Piece(piece));
                    self.ready.extend(values.iter().map(event));
                }
                Some(Err(error)) => {
                    self.done = true;
                    self.ready.push_back(event(&error.body()));
                }
                None => {
                    self.done = true;
                    if self.include_usage {
                        let values = (self.write)(Update::Usage(self.answers.usage()));
                        self.ready.extend(values.iter().map(event));
                    }
                    self.ready.push_back(Event::default().data("[DONE]"));
                }
            }
        }
    }
}

/// An event with a value as JSON, which has no line breaks and so is one line.
fn event(value: &impl Serialize) -> Event {
    // Bodies consist of strings and numbers, so they can always be serialised.
    Event::default().data(serde_json::to_string(value).unwrap_or_default())
}

/// A unique id of a response.
pub(crate) fn id(kind: &str) -> String {
    format!("{kind}-{:032x}", rand::random::<u128>())
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
