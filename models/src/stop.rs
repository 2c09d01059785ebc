//! Stop strings: ends a generated text where one of them appears, even across tokens.

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
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<Stop>,
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

/// One stop string and how much of it the text ends with (Knuth, Morris and Pratt, 1977).
#[derive(Clone, Debug)]
struct Stop {
    bytes: Vec<u8>,
    /// For each prefix length, the length of the longest shorter prefix that the prefix ends with.
    fallback: Vec<usize>,
    seen: usize,
}

impl StopMatcher {
    /// A matcher for `stops`. Empty strings are never found; positions count them all the same.
    pub fn new(stops: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let stops = stops.into_iter().map(|stop| Stop::new(stop.into().into_bytes())).collect();
        Self { stops, held: String::new(), matched: None }
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
            for (index, stop) in self.stops.iter_mut().enumerate() {
                let length = stop.bytes.len();
                if stop.advance(byte) && complete.is_none_or(|(_, longest)| longest < length) {
                    complete = Some((index, length));
                }
            }
            if let Some((index, length)) = complete {
                self.held.truncate(before + offset + 1 - length);
                self.matched = Some(index);
                return StopOutput { text: std::mem::take(&mut self.held), matched: self.matched };
            }
        }
        let keep = self.stops.iter().map(|stop| stop.seen).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - keep);
        StopOutput { text: std::mem::replace(&mut self.held, held), matched: None }
    }

    /// The text that was held back, once no more comes.
    pub fn finish(&mut self) -> String {
        for stop in &mut self.stops {
            stop.seen = 0;
        }
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
        Self { bytes, fallback, seen: 0 }
    }

    /// Takes one more byte of the text; whether the stop string is complete with it.
    fn advance(&mut self, byte: u8) -> bool {
        if self.bytes.is_empty() {
            return false;
        }
        while self.seen > 0 && self.bytes[self.seen] != byte {
            self.seen = self.fallback[self.seen];
        }
        if self.bytes[self.seen] == byte {
            self.seen += 1;
        }
        self.seen == self.bytes.len()
    }
}

#[cfg(test)]
mod tests;
