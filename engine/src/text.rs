//! From the tokens of an answer to its text.

use crate::request::{FinishReason, TokenEvent};
use dsrun_models::{
    stop::{StopMatcher, StopOutput},
    tokenizer::{StreamDecoder, StreamOptions, Tokenizer},
};
use std::sync::Arc;

/// Detokenises one answer as its tokens arrive: emits complete characters only, and ends before a stop string.
#[derive(Debug)]
pub struct TextStream {
    /// Absent if the model has no tokenizer: the text is empty then.
    decoder: Option<StreamDecoder>,
    stops: StopMatcher,
    /// The number of next tokens whose text is not searched for stop strings.
    unsearched: usize,
    /// Control tokens that are part of the text, with their texts.
    shown: Arc<[(u32, String)]>,
}

/// The text that a token added to an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextPiece {
    /// Text that is final: it cannot become part of a stop string or of an incomplete character. May be empty, or the text of
    /// several tokens.
    pub text: String,
    /// Text decoded from this token. A part of it may be held back as the beginning of a stop string.
    pub decoded: String,
    /// The index of the stop string that ended the answer, if one did.
    pub stop: Option<usize>,
    /// The reason why the answer ended, if it did: that of the token, or a stop string, after which the request still runs.
    pub finish: Option<FinishReason>,
}

impl TextStream {
    /// Makes a stream for an answer that ends before the first occurrence of any of the `stop` strings.
    pub fn new(tokenizer: Option<&Tokenizer>, stop: &[String]) -> Self {
        Self::with_stops(tokenizer, StopMatcher::new(stop))
    }

    /// Same as [`Self::new`], with the stop strings of a matcher; clones of a matcher share its memory.
    pub fn with_stops(tokenizer: Option<&Tokenizer>, stops: StopMatcher) -> Self {
        let options = StreamOptions { skip_special: true, continues_text: true };
        let decoder = tokenizer.map(|tokenizer| StreamDecoder::new(tokenizer, options));
        Self { decoder, stops, unsearched: 0, shown: [].into() }
    }

    /// Includes these control tokens in the text, each with the given text. Other control tokens give no text.
    pub fn showing(self, shown: Arc<[(u32, String)]>) -> Self {
        Self { shown, ..self }
    }

    /// Searches for stop strings only behind the first `tokens` tokens.
    pub fn searching_after(self, tokens: usize) -> Self {
        Self { unsearched: tokens, ..self }
    }

    /// Adds a token. After a piece with a finish reason, no more tokens may be added.
    pub fn push(&mut self, event: &TokenEvent) -> TextPiece {
        self.add(Some(event.token), event.finish)
    }

    /// Ends the answer with a token that is not a part of its text.
    pub fn end(&mut self, finish: FinishReason) -> TextPiece {
        self.add(None, Some(finish))
    }

    fn add(&mut self, token: Option<u32>, finish: Option<FinishReason>) -> TextPiece {
        let mut decoded = String::new();
        if let Some(decoder) = &mut self.decoder {
            if let Some(token) = token {
                decoded = match self.shown.iter().find(|(id, _)| *id == token) {
                    // A control token ends an incomplete character, which is emitted as it is.
                    Some((_, text)) => decoder.finish().unwrap_or_default() + text,
                    None => decoder.push(token).unwrap_or_default(),
                };
            }
            if finish.is_some() {
                decoded.push_str(&decoder.finish().unwrap_or_default());
            }
        }
        let output = match self.unsearched {
            0 => self.stops.push(&decoded),
            _ => StopOutput { text: decoded.clone(), matched: None },
        };
        self.unsearched -= self.unsearched.min(1);
        let (mut text, stop, stopped) = (output.text, output.matched, output.matched.is_some());
        let finish = if stopped { Some(FinishReason::Stop) } else { finish };
        if finish.is_some() && !stopped {
            text.push_str(&self.stops.finish());
        }
        TextPiece { text, decoded, stop, finish }
    }
}
