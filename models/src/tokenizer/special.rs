//! Cuts the special tokens out of a text before it is split into words.

use aho_corasick::{AhoCorasick, MatchKind};

use super::error::{Result, TokenizerError};

/// A stretch of text, or a special token that was written in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fragment<'text> {
    /// Text to be split into words; never empty.
    Text(&'text str),
    /// A token that was written out.
    Token(u32),
}

/// Finds special tokens in text: the leftmost, and of those that begin there the longest.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    /// Tokens that are always read as such (user-defined ones).
    always: Option<Matcher>,
    /// Those and the control tokens.
    all: Option<Matcher>,
}

#[derive(Debug)]
struct Matcher {
    automaton: AhoCorasick,
    ids: Vec<u32>,
}

impl SpecialTokens {
    /// `control` tokens are found only when asked for, `user_defined` ones always.
    pub(super) fn new(control: &[(u32, &str)], user_defined: &[(u32, &str)]) -> Result<Self> {
        let all: Vec<_> = control.iter().chain(user_defined).copied().collect();
        Ok(Self { always: Matcher::new(user_defined)?, all: Matcher::new(&all)? })
    }

    /// Cuts `text` into fragments, in order.
    pub(super) fn split<'text>(&self, text: &'text str, parse_special: bool) -> Vec<Fragment<'text>> {
        let matcher = if parse_special { &self.all } else { &self.always };
        let mut fragments = Vec::new();
        let mut rest = 0;
        if let Some(matcher) = matcher {
            for found in matcher.automaton.find_iter(text) {
                if rest < found.start() {
                    fragments.push(Fragment::Text(&text[rest..found.start()]));
                }
                fragments.push(Fragment::Token(matcher.ids[found.pattern().as_usize()]));
                rest = found.end();
            }
        }
        if rest < text.len() {
            fragments.push(Fragment::Text(&text[rest..]));
        }
        fragments
    }
}

impl Matcher {
    fn new(tokens: &[(u32, &str)]) -> Result<Option<Self>> {
        // An empty token would be found everywhere.
        let tokens: Vec<_> = tokens.iter().filter(|(_, text)| !text.is_empty()).collect();
        if tokens.is_empty() {
            return Ok(None);
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(_, text)| text))
            .map_err(|error| TokenizerError::Vocabulary { message: format!("special tokens: {error}") })?;
        Ok(Some(Self { automaton, ids: tokens.iter().map(|(id, _)| *id).collect() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_and_respects_the_kind() {
        let special = SpecialTokens::new(&[(1, "<a>"), (2, "<a><b>"), (9, "")], &[(3, "  ")]).unwrap();
        assert_eq!(
            special.split("x<a><b>  y<a>", true),
            [
                Fragment::Text("x"),
                Fragment::Token(2),
                Fragment::Token(3),
                Fragment::Text("y"),
                Fragment::Token(1)
            ]
        );
        assert_eq!(
            special.split("x<a>  y", false),
            [Fragment::Text("x<a>"), Fragment::Token(3), Fragment::Text("y")]
        );
        assert_eq!(special.split("", true), []);
    }

    #[test]
    fn without_special_tokens_text_is_whole() {
        let special = SpecialTokens::new(&[], &[]).unwrap();
        assert_eq!(special.split("<a>", true), [Fragment::Text("<a>")]);
    }
}
