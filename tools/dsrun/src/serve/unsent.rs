//! A bound on the memory of responses that are complete and not sent yet.
//!
//! `/tokenize`, `/detokenize` and `/v1/embeddings` turn a small request into a large response, which stays in memory until its client
//! has read it, and an answer that is not streamed grows until it is complete. Clients that do not read, or that ask for many tokens
//! with their alternatives, could fill the memory that way. So these bytes are counted until they are sent: beyond the limit, requests
//! are refused before they cost work, and beyond twice the limit responses are dropped. Who reads too slowly is disconnected.

use super::{
    budget::{Budget, Held},
    error::ApiError,
};
use axum::{
    body::{Body, HttpBody, to_bytes},
    extract::State,
    http::{Method, Request},
    middleware::Next,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

/// The bytes of a response that is counted. Smaller ones are bounded by the number of connections.
const LARGE: usize = 64 << 10;

/// Counts the bytes of responses that are not sent yet.
#[derive(Debug)]
pub(crate) struct Unsent {
    budget: Arc<Budget>,
    /// The bytes from which on requests are refused.
    limit: usize,
    /// The longest time that a client may take to read a large response.
    patience: Duration,
}

impl Unsent {
    /// From `limit` bytes on, requests are refused. A client has `patience` to read a large response.
    pub(crate) fn new(limit: usize, patience: Duration) -> Arc<Self> {
        Arc::new(Self { budget: Budget::new(limit.saturating_mul(2)), limit, patience })
    }

    /// Counts the bytes of an answer that grows.
    pub(super) fn start(&self) -> Held {
        self.budget.start()
    }

    /// The bytes that are counted now.
    pub(super) fn bytes(&self) -> usize {
        self.budget.held()
    }
}

/// The body of a large response, in pieces: the connection takes one when it has room for it.
struct LargeBody {
    rest: Bytes,
    /// The time by which the client must have read it.
    deadline: Instant,
    _held: Held,
}

impl HttpBody for LargeBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        if Instant::now() > self.deadline {
            return Poll::Ready(Some(Err(io::ErrorKind::TimedOut.into())));
        }
        let piece = LARGE.min(self.rest.len());
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}

/// Counts the bytes of a large response until it is sent.
pub(super) async fn bound(State(unsent): State<Arc<Unsent>>, request: Request<Body>, next: Next) -> Response {
    if request.method() == Method::POST && unsent.bytes() > unsent.limit {
        return ApiError::too_much_unsent().into_response();
    }
    let response = next.run(request).await;
    // Streams have no size, and are produced as they are read.
    let bytes = response.body().size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok());
    let Some(bytes) = bytes.filter(|bytes| *bytes > LARGE) else { return response };
    let Some(held) = unsent.budget.hold(bytes) else { return ApiError::too_much_unsent().into_response() };
    let (head, body) = response.into_parts();
    match to_bytes(body, bytes).await {
        Ok(rest) => {
            let deadline = Instant::now() + unsent.patience;
            Response::from_parts(head, Body::new(LargeBody { rest, deadline, _held: held }))
        }
        Err(_) => ApiError::internal().into_response(),
    }
}
