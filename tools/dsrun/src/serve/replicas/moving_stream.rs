//! The tokens of a request that moves to another engine if its own fails before it begins.

use super::Replicas;
use dsrun_engine::{
    Request, TokenEvent,
    service::{ServiceError, TokenStream},
};
use std::time::Instant;

/// The tokens of a request. If its engine fails before it begins the request, another engine runs it.
#[derive(Debug)]
pub(crate) struct MovingStream {
    tokens: TokenStream,
    /// The request, until it begins; `None` if there is no other engine.
    again: Option<Request>,
}

impl MovingStream {
    pub(super) fn new(tokens: TokenStream, again: Option<Request>) -> Self {
        Self { tokens, again }
    }

    /// As [`TokenStream::begun`].
    pub(crate) fn begun(&self) -> Option<Instant> {
        self.tokens.begun()
    }

    /// The next token; `None` after the last.
    ///
    /// # Errors
    /// As [`TokenStream::next`], if no other engine runs the request.
    pub(crate) async fn next(&mut self, replicas: &Replicas) -> Option<Result<TokenEvent, ServiceError>> {
        loop {
            match (self.tokens.next().await?, &self.again) {
                (Err(ServiceError::NotBegun { .. }), Some(request)) => {
                    match replicas.take_over(request.clone()) {
                        Ok(tokens) => self.tokens = tokens,
                        Err(error) => return Some(Err(error)),
                    }
                }
                (event, _) => {
                    self.again = None;
                    return Some(event);
                }
            }
        }
    }
}
