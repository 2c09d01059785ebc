//! From tokens to text: characters complete, stop strings found, every token with the text it belongs to.

use super::api::TokenLogprob;
use dsrun_engine::TokenEvent;
use dsrun_models::{
    stop::StopMatcher,
    tokenizer::{StreamDecoder, StreamOptions, Tokenizer},
};
use std::collections::VecDeque;

/// A token, and what else could have stood there.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Token {
    pub(crate) chosen: TokenLogprob,
    pub(crate) top: Vec<TokenLogprob>,
    /// Where in the answer its text starts, in characters.
    pub(crate) offset: usize,
}

/// What a token led to.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Output {
    /// Text that is certain now.
    pub(crate) text: String,
    /// The tokens of that text, if they were asked for.
    pub(crate) tokens: Vec<Token>,
    /// A stop string came: this is the end.
    pub(crate) stopped: bool,
}

/// The text of an answer, as its tokens come.
#[derive(Debug)]
pub(crate) struct TextStream {
    /// None for a model without a tokenizer: there is no text then.
    tokenizer: Option<Tokenizer>,
    decoder: Option<StreamDecoder>,
    stops: StopMatcher,
    /// Whether tokens are wanted.
    keep_tokens: bool,
    /// Tokens whose text is not certain yet, with where in the answer they start, in bytes.
    held: VecDeque<(usize, Token)>,
    /// Bytes and characters that the tokens so far gave.
    decoded: (usize, usize),
    /// Bytes that are certain.
    certain: usize,
}

impl TextStream {
    pub(crate) fn new(tokenizer: Option<&Tokenizer>, stop: &[String], keep_tokens: bool) -> Self {
        let options = StreamOptions { skip_special: true, continues_text: true };
        Self {
            tokenizer: tokenizer.cloned(),
            decoder: tokenizer.map(|tokenizer| StreamDecoder::new(tokenizer, options)),
            stops: StopMatcher::new(stop),
            keep_tokens,
            held: VecDeque::new(),
            decoded: (0, 0),
            certain: 0,
        }
    }

    /// Takes a token. An end token, which is no part of the answer, is not `shown`.
    pub(crate) fn push(&mut self, event: &TokenEvent, shown: bool) -> Output {
        if self.keep_tokens && shown {
            let token = self.token(event);
            self.held.push_back((self.decoded.0, token));
        }
        let mut text = String::new();
        if let Some(decoder) = &mut self.decoder {
            text = decoder.push(event.token).unwrap_or_default();
            if event.finish.is_some() {
                text.push_str(&decoder.finish().unwrap_or_default());
            }
        }
        self.decoded.0 += text.len();
        self.decoded.1 += text.chars().count();
        let matched = self.stops.push(&text);
        let mut output =
            Output { text: matched.text, tokens: Vec::new(), stopped: matched.matched.is_some() };
        if event.finish.is_some() && !output.stopped {
            output.text.push_str(&self.stops.finish());
        }
        self.certain += output.text.len();
        let last = output.stopped || event.finish.is_some();
        output.tokens = self.release(last);
        output
    }

    /// The tokens whose text is certain. Of those of a stop string, the ones in front of it.
    fn release(&mut self, last: bool) -> Vec<Token> {
        let mut tokens = Vec::new();
        while let Some((start, _)) = self.held.front() {
            let end = self.held.get(1).map_or(self.decoded.0, |next| next.0);
            // A token without text of its own (a part of a character, a control token) belongs to where it stands.
            let certain = end <= self.certain || (last && *start < self.certain);
            if !certain {
                break;
            }
            tokens.extend(self.held.pop_front().map(|held| held.1));
        }
        tokens
    }

    fn token(&self, event: &TokenEvent) -> Token {
        let describe = |token: u32, logprob: f32| {
            let bytes =
                self.tokenizer.as_ref().map_or_else(Vec::new, |tokenizer| tokenizer.token_bytes(token));
            TokenLogprob { token: String::from_utf8_lossy(&bytes).into_owned(), logprob, bytes }
        };
        Token {
            chosen: describe(event.token, event.log_probability),
            top: event.top.iter().map(|(token, logprob)| describe(*token, *logprob)).collect(),
            offset: self.decoded.1,
        }
    }
}
