//! The parts of a choice: waiting, its prompt, its tokens.

use super::RequestTrace;
use opentelemetry::KeyValue;
use std::time::Instant;

/// The trace of a choice. Its parts are recorded when it is dropped.
#[derive(Debug)]
pub(in crate::serve) struct ChoiceTrace {
    request: RequestTrace,
    index: usize,
    submitted: Instant,
    /// The time at which the first step with the choice began.
    begun: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Instant,
    tokens: usize,
}

impl ChoiceTrace {
    /// A choice that is submitted now.
    pub(in crate::serve) fn new(request: RequestTrace, index: usize) -> Self {
        let now = Instant::now();
        Self { request, index, submitted: now, begun: None, first_token: None, last_token: now, tokens: 0 }
    }

    /// Notes when the engine began with the choice, once it has.
    pub(in crate::serve) fn begin(&mut self, begun: Option<Instant>) {
        self.begun = self.begun.or(begun);
    }

    /// Notes a token that has come at `now`.
    pub(in crate::serve) fn token(&mut self, now: Instant) {
        self.first_token.get_or_insert(now);
        self.last_token = now;
        self.tokens += 1;
    }
}

impl Drop for ChoiceTrace {
    fn drop(&mut self) {
        let Some(open) = &self.request.0 else { return };
        let choice = || KeyValue::new("dsrun.choice.index", i64::try_from(self.index).unwrap_or(i64::MAX));
        let now = Instant::now();
        // The engine takes requests between its steps, so a choice may begin in a step that began before it was submitted.
        let begun = self.begun.map(|begun| begun.max(self.submitted));
        open.part("queue", self.submitted, begun.unwrap_or(now), vec![choice()]);
        let Some(begun) = begun else { return };
        open.part("prefill", begun, self.first_token.unwrap_or(now), vec![choice()]);
        let Some(first) = self.first_token else { return };
        let tokens = KeyValue::new("dsrun.choice.tokens", i64::try_from(self.tokens).unwrap_or(i64::MAX));
        open.part("decode", first, self.last_token, vec![choice(), tokens]);
    }
}
