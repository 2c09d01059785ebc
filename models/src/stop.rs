//! Stop strings: ends a generated text where one of them appears, even across tokens.

use std::sync::Arc;

/// Looks for stop strings in a text that comes in pieces.
///
/// Text that may still turn out to be the start of a stop string is held back, so what [`Self::push`] gives out never
/// has to be taken back. The stop string that is complete first ends the text; of several that are complete with the
/// same character, the longest. How the text is cut into pieces makes no difference.
///
/// ```
/// # use dsrun_models::stop::StopMatcher;
/// let mut matcher = StopMatcher::new(["\nUser:"]);
/// assert_eq!(matcher.push("Hello.\nUs").text, "Hello.");
/// let output = matcher.push("er: and");
/// assert_eq!((output.text.as_str(), output.matched), ("", Some(0)));
/// ```
///
/// Clones share the stop strings.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Arc<[Stop]>,
    /// How much of each stop string the text ends with, in bytes.
    seen: Vec<usize>,
    /// The end of the text that was not given out: the longest that begins a stop string.
    held: String,
    matched: Option<usize>,
}

/// What a piece of text led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopOutput {
    /// Text that is certainly no part of a stop string.
    pub text: String,
    /// The stop string that ended the text, by its position in the list. Nothing comes after it.
    pub matched: Option<usize>,
}

/// One stop string (Knuth, Morris and Pratt, 1977).
#[derive(Clone, Debug)]
struct Stop {
    bytes: Vec<u8>,
    /// For each prefix length, the length of the longest shorter prefix that the prefix ends with.
    fallback: Vec<usize>,
}

impl StopMatcher {
    /// A matcher for `stops`. Empty strings are never found; positions count them all the same.
    pub fn new(stops: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let stops: Arc<[Stop]> = stops.into_iter().map(|stop| Stop::new(stop.into().into_bytes())).collect();
        let seen = vec![0; stops.len()];
        Self { stops, seen, held: String::new(), matched: None }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, text: &str) -> StopOutput {
        if self.matched.is_some() {
            return StopOutput { text: String::new(), matched: self.matched };
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (offset, byte) in text.bytes().enumerate() {
            // The index and length of the longest stop string that this byte completes.
            let mut complete: Option<(usize, usize)> = None;
            for (index, (stop, seen)) in self.stops.iter().zip(&mut self.seen).enumerate() {
                let length = stop.bytes.len();
                if stop.advance(seen, byte) && complete.is_none_or(|(_, longest)| longest < length) {
                    complete = Some((index, length));
                }
            }
            if let Some((index, length)) = complete {
                self.held.truncate(before + offset + 1 - length);
                self.matched = Some(index);
                return StopOutput { text: std::mem::take(&mut self.held), matched: self.matched };
            }
        }
        let keep = self.seen.iter().copied().max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - keep);
        StopOutput { text: std::mem::replace(&mut self.held, held), matched: None }
    }

    /// The text that was held back, once no more comes.
    pub fn finish(&mut self) -> String {
        self.seen.fill(0);
        std::mem::take(&mut self.held)
    }
}

impl Stop {
    fn new(bytes: Vec<u8>) -> Self {
        let mut fallback = vec![0; bytes.len() + 1];
        let mut length = 0;
        for end in 1..bytes.len() {
            while length > 0 && bytes[end] != bytes[length] {
                length = fallback[length];
            }
            if bytes[end] == bytes[length] {
                length += 1;
            }
            fallback[end + 1] = length;
        }
        Self { bytes, fallback }
    }

    /// Takes one more byte of a text that ends with `seen` bytes of the stop string; whether the stop string is complete with it.
    fn advance(&self, seen: &mut usize, byte: u8) -> bool {
        if self.bytes.is_empty() {
            return false;
        }
        while *seen > 0 && self.bytes[*seen] != byte {
            *seen = self.fallback[*seen];
        }
        if self.bytes[*seen] == byte {
            *seen += 1;
        }
        *seen == self.bytes.len()
    }
}

#[cfg(test)]
mod tests;
