//! From the tokens of an answer to its text.

use crate::request::{FinishReason, TokenEvent};
use dsrun_models::{
    stop::StopMatcher,
    tokenizer::{StreamDecoder, StreamOptions, Tokenizer},
};
use std::sync::Arc;

/// The text of one answer as its tokens arrive: characters are complete, and the answer ends before a stop string.
#[derive(Debug)]
pub struct TextStream {
    /// Absent if the model has no tokenizer: the text is empty then.
    decoder: Option<StreamDecoder>,
    stops: StopMatcher,
    /// Control tokens that are part of the text, with their texts.
    shown: Arc<[(u32, String)]>,
}

/// The text that a token added to an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextPiece {
    /// Text that is certain now; it may be empty, or the text of several tokens.
    pub text: String,
    /// Text decoded from this token. A part of it may be held back as the beginning of a stop string.
    pub decoded: String,
    /// The index of the stop string that ended the answer, if one did.
    pub stop: Option<usize>,
    /// The reason why the answer ended, if it did: that of the token, or a stop string, after which the request still runs.
    pub finish: Option<FinishReason>,
}

impl TextStream {
    /// The text of an answer that ends before each of the `stop` strings.
    pub fn new(tokenizer: Option<&Tokenizer>, stop: &[String]) -> Self {
        Self::with_stops(tokenizer, StopMatcher::new(stop))
    }

    /// The text of an answer that ends before each of the stop strings of a matcher, whose clones share them.
    pub fn with_stops(tokenizer: Option<&Tokenizer>, stops: StopMatcher) -> Self {
        let options = StreamOptions { skip_special: true, continues_text: true };
        let decoder = tokenizer.map(|tokenizer| StreamDecoder::new(tokenizer, options));
        Self { decoder, stops, shown: [].into() }
    }

    /// The same with control tokens as part of the text, each with its text. Other control tokens give no text.
    pub fn showing(self, shown: Arc<[(u32, String)]>) -> Self {
        Self { shown, ..self }
    }

    /// Adds a token. After a piece with a finish reason, no more tokens may be added.
    pub fn push(&mut self, event: &TokenEvent) -> TextPiece {
        let mut decoded = String::new();
        if let Some(decoder) = &mut self.decoder {
            decoded = match self.shown.iter().find(|(id, _)| *id == event.token) {
                // A character that was not completed before a control token will not be.
                Some((_, text)) => decoder.finish().unwrap_or_default() + text,
                None => decoder.push(event.token).unwrap_or_default(),
            };
            if event.finish.is_some() {
                decoded.push_str(&decoder.finish().unwrap_or_default());
            }
        }
        let output = self.stops.push(&decoded);
        let (mut text, stop, stopped) = (output.text, output.matched, output.matched.is_some());
        let finish = if stopped { Some(FinishReason::Stop) } else { event.finish };
        if finish.is_some() && !stopped {
            text.push_str(&self.stops.finish());
        }
        TextPiece { text, decoded, stop, finish }
    }
}
