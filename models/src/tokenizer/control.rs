//! Finds the text of control tokens in text that is not to have any.

use super::error::{Result, TokenizerError};
use aho_corasick::AhoCorasick;

/// The texts of a vocabulary's control tokens.
#[derive(Debug)]
pub(crate) struct ControlTokens {
    /// None if there are no control tokens.
    automaton: Option<AhoCorasick>,
    /// In order.
    texts: Vec<Box<str>>,
    /// Bytes of the longest.
    longest: usize,
}

impl ControlTokens {
    pub(super) fn new<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Self> {
        // An empty token would be found everywhere.
        let mut texts: Vec<Box<str>> = texts.filter(|text| !text.is_empty()).map(Into::into).collect();
        texts.sort_unstable();
        let automaton = match texts.is_empty() {
            true => None,
            false => Some(AhoCorasick::new(texts.iter().map(|text| &**text)).map_err(|error| {
                TokenizerError::Vocabulary { message: format!("control tokens: {error}") }
            })?),
        };
        let longest = texts.iter().map(|text| text.len()).max().unwrap_or(0);
        Ok(Self { automaton, texts, longest })
    }

    /// Where control tokens start in a text, in order: all of them, those inside others too, and the one that the end of the
    /// text cuts off, which what is written behind it might complete.
    pub(crate) fn starts(&self, text: &str) -> Vec<usize> {
        let Some(automaton) = &self.automaton else { return Vec::new() };
        let mut starts: Vec<usize> =
            automaton.find_overlapping_iter(text).map(|found| found.start()).collect();
        let tail = text.len().saturating_sub(self.longest);
        let ends = (tail..text.len()).filter(|start| text.is_char_boundary(*start));
        starts.extend(ends.filter(|start| self.some_starts_with(&text[*start..])));
        starts.sort_unstable();
        starts.dedup();
        starts
    }

    fn some_starts_with(&self, text: &str) -> bool {
        let first = self.texts.partition_point(|token| **token < *text);
        self.texts.get(first).is_some_and(|token| token.starts_with(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("plain", &[])]
    #[case("", &[])]
    #[case("x<a>y<a>", &[1, 5])]
    #[case("<a><b>", &[0, 3])]
    #[case("ü<a", &[2])]
    #[case("<a><", &[0, 3])]
    #[case("< a>", &[])]
    #[case("<<b>", &[1])]
    #[case("c>", &[])]
    fn all_starts_are_found(#[case] text: &str, #[case] expected: &[usize]) {
        let tokens = ControlTokens::new(["<a>", "", "<a><b>", "<b>"].into_iter()).unwrap();
        assert_eq!(tokens.starts(text), expected);
        assert!(ControlTokens::new(std::iter::empty()).unwrap().starts(text).is_empty());
    }
}
