//! The text of an answer with its tokens: each token is released when its text is certain.

use super::api::TokenLogprob;
use dsrun_engine::{FinishReason, TextStream, TokenEvent};
use dsrun_models::{stop::StopMatcher, tokenizer::Tokenizer};
use std::{collections::VecDeque, sync::Arc};

/// The logarithm that is reported for a token that cannot be chosen; that of OpenAI and vLLM.
const LEAST_LOGPROB: f32 = -9999.0;

/// A token of an answer, with its most likely alternatives.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Token {
    pub(crate) chosen: TokenLogprob,
    pub(crate) top: Vec<TokenLogprob>,
    /// The place in the answer where its text starts, in characters.
    pub(crate) offset: usize,
}

/// The result of adding a token to an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Output {
    /// Text that is certain now.
    pub(crate) text: String,
    /// The tokens of that text, if they were asked for.
    pub(crate) tokens: Vec<Token>,
    /// The index of the stop string that ended the answer, if one did.
    pub(crate) stop: Option<usize>,
    /// The reason why the answer ended, if it did.
    pub(crate) finish: Option<FinishReason>,
}

/// The text of an answer, and its tokens if they are asked for.
#[derive(Debug)]
pub(crate) struct AnswerText {
    stream: TextStream,
    /// Absent for a model without a tokenizer: tokens have no text then.
    tokenizer: Option<Tokenizer>,
    /// Whether tokens are asked for.
    keep_tokens: bool,
    /// Tokens whose text is not certain yet, with their start in the answer, in bytes.
    held: VecDeque<(usize, Token)>,
    /// Bytes and characters decoded so far.
    decoded: (usize, usize),
    /// Bytes that are certain.
    certain: usize,
}

impl AnswerText {
    /// The text of an answer that ends before each of the stop strings. The control tokens in `shown` are part of it, with these texts;
    /// `keep_tokens` asks for its tokens.
    pub(crate) fn new(
        tokenizer: Option<&Tokenizer>,
        stops: StopMatcher,
        shown: Arc<[(u32, String)]>,
        keep_tokens: bool,
    ) -> Self {
        Self {
            stream: TextStream::with_stops(tokenizer, stops).showing(shown),
            tokenizer: tokenizer.cloned(),
            keep_tokens,
            held: VecDeque::new(),
            decoded: (0, 0),
            certain: 0,
        }
    }

    /// Adds a token. `shown` is false for end tokens, whose text does not belong to the answer.
    pub(crate) fn push(&mut self, event: &TokenEvent, shown: bool) -> Output {
        if self.keep_tokens && shown {
            let token = self.token(event);
            self.held.push_back((self.decoded.0, token));
        }
        let piece = self.stream.push(event);
        self.decoded.0 += piece.decoded.len();
        self.decoded.1 += piece.decoded.chars().count();
        self.certain += piece.text.len();
        let tokens = self.release(piece.finish.is_some());
        Output { text: piece.text, tokens, stop: piece.stop, finish: piece.finish }
    }

    /// Takes the tokens whose text is certain. Tokens of a stop string are not released.
    fn release(&mut self, last: bool) -> Vec<Token> {
        let mut tokens = Vec::new();
        while let Some((start, _)) = self.held.front() {
            let end = self.held.get(1).map_or(self.decoded.0, |next| next.0);
            // A token without text of its own (a part of a character, a control token) is certain where it stands.
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
            // A grammar or a bias can exclude a token, and JSON has no infinity.
            let logprob = logprob.max(LEAST_LOGPROB);
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
