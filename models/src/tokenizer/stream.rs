//! Decoding one token at a time.

use super::Tokenizer;
use super::pieces::{Rule, TextStart};

/// How a [`StreamDecoder`] reads its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// Control tokens give no text.
    pub skip_special: bool,
    /// The tokens go on from a text that is already there, as a generated answer does from its prompt. Some vocabularies
    /// drop the space in front of the first word of a text; of a continuation it must be kept.
    pub continues_text: bool,
}

/// Turns tokens into text as they come, never splitting a character.
///
/// A character may take several tokens; its bytes are held back (three at most) until it is complete. The pieces
/// together, with what [`Self::finish`] returns, are exactly what [`Tokenizer::decode`] gives for all tokens at once.
/// The cost of a token does not depend on how many came before.
///
/// An id without a token, such as a padding row of the model's output, gives no text.
///
/// ```
/// # use dsrun_models::tokenizer::{GgufVocabulary, StreamDecoder, StreamOptions, Tokenizer};
/// # let vocabulary = GgufVocabulary {
/// #     model: "gpt2".into(), pre_tokenizer: Some("gpt-2".into()),
/// #     tokens: vec!["Ã".into(), "©".into()], ..GgufVocabulary::default()
/// # };
/// let tokenizer = Tokenizer::from_gguf(vocabulary)?; // tokens 0 and 1 are the two bytes of "é"
/// let mut stream = StreamDecoder::new(&tokenizer, StreamOptions::default());
/// assert_eq!(stream.push(0), None);
/// assert_eq!(stream.push(1).as_deref(), Some("é"));
/// assert_eq!(stream.finish(), None);
/// # Ok::<(), dsrun_models::tokenizer::TokenizerError>(())
/// ```
#[derive(Clone, Debug)]
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Bytes of a character that is not complete.
    pending: Vec<u8>,
    /// Spaces that may still be dropped from the start of the text.
    droppable_spaces: usize,
    at_start: bool,
    /// The token before, where pieces depend on it.
    previous: Option<u32>,
}

impl StreamDecoder {
    /// A decoder that has seen no tokens.
    pub fn new(tokenizer: &Tokenizer, options: StreamOptions) -> Self {
        let droppable_spaces = match tokenizer.pieces().rule() {
            Rule::Bytes { start: TextStart::WithoutSpaces(count), .. } if !options.continues_text => *count,
            _ => 0,
        };
        Self {
            tokenizer: tokenizer.clone(),
            skip_special: options.skip_special,
            pending: Vec::new(),
            droppable_spaces,
            at_start: !options.continues_text,
            previous: None,
        }
    }

    /// The text that is complete with this token, if any.
    pub fn push(&mut self, id: u32) -> Option<String> {
        let mut text = String::new();
        self.push_to(id, &mut text);
        (!text.is_empty()).then_some(text)
    }

    /// What is left at the end: U+FFFD for a character that was never completed.
    pub fn finish(&mut self) -> Option<String> {
        let mut text = String::new();
        self.finish_to(&mut text);
        (!text.is_empty()).then_some(text)
    }

    pub(super) fn push_to(&mut self, id: u32, text: &mut String) {
        let tokenizer = self.tokenizer.clone();
        let pieces = tokenizer.pieces();
        let Some(token) = pieces.token(id) else { return };
        if self.skip_special && pieces.is_special(id) {
            return;
        }
        match pieces.rule() {
            Rule::Bytes { start: TextStart::WithoutMarker(marker), .. } if self.at_start => {
                self.push_bytes(token.replace(*marker, "").as_bytes(), text);
            }
            Rule::Bytes { bytes, ends, .. } => {
                self.push_bytes(Rule::bytes_of(bytes, ends, id).as_ref(), text);
            }
            Rule::Neighbours(decode) => {
                // A continuation has a token before it, just not one that is known. Any token does: only that there is
                // one makes a difference.
                let previous = if self.at_start { self.previous } else { Some(self.previous.unwrap_or(id)) };
                let previous = previous.and_then(|previous| pieces.token(previous));
                let context = previous.map(|previous| decode(vec![previous.to_owned()])).unwrap_or_default();
                let whole = decode(previous.into_iter().chain([token]).map(str::to_owned).collect());
                text.push_str(whole.strip_prefix(context.as_str()).unwrap_or(&whole));
                self.previous = Some(id);
            }
        }
        self.at_start = false;
    }

    pub(super) fn finish_to(&mut self, text: &mut String) {
        if !self.pending.is_empty() {
            text.push_str(&String::from_utf8_lossy(&self.pending));
            self.pending.clear();
        }
    }

    fn push_bytes(&mut self, mut bytes: &[u8], text: &mut String) {
        while self.droppable_spaces > 0
            && let Some((first, rest)) = bytes.split_first()
        {
            if *first == b' ' {
                self.droppable_spaces -= 1;
                bytes = rest;
            } else {
                self.droppable_spaces = 0;
            }
        }
        self.pending.extend_from_slice(bytes);
        let mut done = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            // What ends the bytes may be the start of a character. `from_utf8` says so by giving no error length.
            let incomplete = done + invalid.len() == self.pending.len()
                && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
            if incomplete {
                break;
            }
            if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
                done += invalid.len();
            }
        }
        self.pending.drain(..done);
    }
}

#[cfg(test)]
mod tests;
