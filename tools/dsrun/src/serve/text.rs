//! Detokenises an answer. Text, and the tokens it consists of, are held back while they may still become part of a stop string or
//! of a multi-byte character.

use super::api::TokenLogprob;
use dsrun_engine::{FinishReason, TextStream, TokenEvent};
use dsrun_models::{stop::StopMatcher, tokenizer::Tokenizer};
use std::{collections::VecDeque, sync::Arc};

/// The log probability reported for a token that cannot be sampled, as by OpenAI and vLLM.
const LEAST_LOGPROB: f32 = -9999.0;

/// A token of an answer, with its most likely alternatives.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Token {
    pub(crate) chosen: TokenLogprob,
    pub(crate) top: Vec<TokenLogprob>,
    /// The offset of its text in the answer, in characters.
    pub(crate) offset: usize,
}

impl Token {
    /// The bytes that it takes.
    pub(crate) fn bytes(&self) -> usize {
        let described =
            |token: &TokenLogprob| size_of::<TokenLogprob>() + token.token.len() + token.bytes.len();
        size_of::<Self>() + described(&self.chosen) + self.top.iter().map(described).sum::<usize>()
    }
}

/// The result of adding a token to an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Output {
    /// Text that became final: it cannot be part of a stop string.
    pub(crate) text: String,
    /// The tokens of that text, if tokens were requested.
    pub(crate) tokens: Vec<Token>,
    /// The index of the stop string that ended the answer, if one did.
    pub(crate) stop: Option<usize>,
    /// The reason why the answer ended, if it did.
    pub(crate) finish: Option<FinishReason>,
}

/// The text of an answer, and its tokens if requested.
#[derive(Debug)]
pub(crate) struct AnswerText {
    stream: TextStream,
    /// `None` for a model without a tokenizer, whose tokens have no text.
    tokenizer: Option<Tokenizer>,
    /// Whether tokens are requested.
    keep_tokens: bool,
    /// Tokens whose text is not final yet, with the offset of their text in bytes.
    held: VecDeque<(usize, Token)>,
    /// The number of bytes and of characters decoded so far.
    decoded: (usize, usize),
    /// The number of bytes that are final.
    certain: usize,
}

impl AnswerText {
    /// An empty answer that ends before the first of the stop strings behind its first `min_tokens` tokens. The control tokens in `shown` are part of the text, with
    /// these texts; `keep_tokens` requests the tokens.
    pub(crate) fn new(
        tokenizer: Option<&Tokenizer>,
        stops: StopMatcher,
        min_tokens: usize,
        shown: Arc<[(u32, String)]>,
        keep_tokens: bool,
    ) -> Self {
        let stream = TextStream::with_stops(tokenizer, stops).searching_after(min_tokens);
        Self {
            stream: stream.showing(shown),
            tokenizer: tokenizer.cloned(),
            keep_tokens,
            held: VecDeque::new(),
            decoded: (0, 0),
            certain: 0,
        }
    }

    /// Adds a token. `shown` is false for end tokens, whose text is not part of the answer.
    pub(crate) fn push(&mut self, event: &TokenEvent, shown: bool) -> Output {
        if self.keep_tokens && shown {
            let token = self.token(event);
            self.held.push_back((self.decoded.0, token));
        }
        let piece = match event.finish {
            Some(finish) if !shown => self.stream.end(finish),
            _ => self.stream.push(event),
        };
        self.decoded.0 += piece.decoded.len();
        self.decoded.1 += piece.decoded.chars().count();
        self.certain += piece.text.len();
        let tokens = self.release(piece.finish.is_some());
        Output { text: piece.text, tokens, stop: piece.stop, finish: piece.finish }
    }

    /// Takes the tokens whose text is final. Tokens of a stop string are never released.
    fn release(&mut self, last: bool) -> Vec<Token> {
        let mut tokens = Vec::new();
        while let Some((start, _)) = self.held.front() {
            let end = self.held.get(1).map_or(self.decoded.0, |next| next.0);
            // A token without text (a part of a character, a control token) is final when the text before it is.
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
            // A grammar or a bias can exclude a token, whose log probability is then minus infinity, which JSON cannot represent.
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
