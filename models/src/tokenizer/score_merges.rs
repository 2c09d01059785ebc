//! Byte-pair encoding in the way of SentencePiece: merges are not listed, they follow from the tokens' scores.
//!
//! A text starts as a list of characters. Two neighbours whose joined text is a token may be merged; of all such
//! pairs the one whose token has the largest score goes first, and the leftmost of equals. Characters that end up in
//! no token are written as byte tokens (Kudo and Richardson, "SentencePiece", 2018; the byte fallback is newer).

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::bytes::byte_token;
use super::error::{Result, TokenizerError};

/// Ids and scores of the tokens that text can turn into.
#[derive(Debug)]
pub(super) struct ScoreMerges {
    tokens: HashMap<Box<str>, (u32, f32)>,
    /// The token of each byte value, where the vocabulary has it.
    bytes: Vec<Option<u32>>,
    unknown: Option<u32>,
}

/// A run of the text that is one symbol by now; a symbol merged into its left neighbour has length 0.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    length: usize,
    previous: Option<usize>,
    next: Option<usize>,
}

/// Two neighbours that may be merged. `length` tells whether one of them has changed since.
struct Candidate {
    score: f32,
    left: usize,
    right: usize,
    length: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

impl ScoreMerges {
    /// `tokens` are those that text may turn into (no control tokens), `byte_id` finds the byte tokens.
    pub(super) fn new(
        tokens: HashMap<Box<str>, (u32, f32)>,
        byte_id: impl Fn(&str) -> Option<u32>,
        unknown: Option<u32>,
    ) -> Self {
        let bytes = (0..=255).map(|byte| byte_id(&byte_token(byte))).collect();
        Self { tokens, bytes, unknown }
    }

    /// Appends the ids of `text`, whose spaces are already written as the vocabulary writes them.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let mut symbols = symbols_of(text);
        let mut queue = BinaryHeap::new();
        for right in 1..symbols.len() {
            self.propose(text, &symbols, right - 1, right, &mut queue);
        }
        while let Some(Candidate { left, right, length, .. }) = queue.pop() {
            let (Symbol { length: left_length, .. }, merged) = (symbols[left], symbols[right]);
            if left_length == 0 || merged.length == 0 || left_length + merged.length != length {
                continue;
            }
            symbols[left].length = length;
            symbols[left].next = merged.next;
            symbols[right].length = 0;
            if let Some(next) = merged.next {
                symbols[next].previous = Some(left);
                self.propose(text, &symbols, left, next, &mut queue);
            }
            if let Some(previous) = symbols[left].previous {
                self.propose(text, &symbols, previous, left, &mut queue);
            }
        }
        for symbol in symbols.iter().filter(|symbol| symbol.length > 0) {
            self.push(&text[symbol.start..symbol.start + symbol.length], ids)?;
        }
        Ok(())
    }

    fn propose(
        &self,
        text: &str,
        symbols: &[Symbol],
        left: usize,
        right: usize,
        queue: &mut BinaryHeap<Candidate>,
    ) {
        let start = symbols[left].start;
        let length = symbols[left].length + symbols[right].length;
        if let Some(&(_, score)) = self.tokens.get(&text[start..start + length]) {
            queue.push(Candidate { score, left, right, length });
        }
    }

    fn push(&self, symbol: &str, ids: &mut Vec<u32>) -> Result<()> {
        if let Some(&(id, _)) = self.tokens.get(symbol) {
            ids.push(id);
            return Ok(());
        }
        let bytes: Option<Vec<u32>> = symbol.bytes().map(|byte| self.bytes[usize::from(byte)]).collect();
        match (bytes, self.unknown, symbol.chars().next()) {
            (Some(bytes), _, _) => ids.extend(bytes),
            (None, Some(unknown), _) => ids.push(unknown),
            (None, None, Some(character)) => return Err(TokenizerError::Unencodable { character }),
            (None, None, None) => {}
        }
        Ok(())
    }
}

fn symbols_of(text: &str) -> Vec<Symbol> {
    let mut symbols: Vec<Symbol> = text
        .char_indices()
        .enumerate()
        .map(|(index, (start, character))| Symbol {
            start,
            length: character.len_utf8(),
            previous: index.checked_sub(1),
            next: Some(index + 1),
        })
        .collect();
    if let Some(last) = symbols.last_mut() {
        last.next = None;
    }
    symbols
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn merges(tokens: &[(&str, f32)], unknown: Option<u32>) -> ScoreMerges {
        let ids: HashMap<Box<str>, (u32, f32)> = tokens
            .iter()
            .enumerate()
            .map(|(id, (text, score))| ((*text).into(), (id as u32, *score)))
            .collect();
        let lookup = ids.clone();
        ScoreMerges::new(ids, |token| lookup.get(token).map(|entry| entry.0), unknown)
    }

    fn encode(merges: &ScoreMerges, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        merges.encode(text, &mut ids).map(|()| ids)
    }

    /// The definition, with no queue: look at all pairs, merge the best, again.
    fn naive(merges: &ScoreMerges, text: &str) -> Vec<u32> {
        let mut symbols: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let mut best: Option<(f32, usize)> = None;
            for left in 0..symbols.len().saturating_sub(1) {
                let joined = format!("{}{}", symbols[left], symbols[left + 1]);
                if let Some(&(_, score)) = merges.tokens.get(joined.as_str())
                    && best.is_none_or(|(best_score, _)| score > best_score)
                {
                    best = Some((score, left));
                }
            }
            let Some((_, left)) = best else { break };
            let right = symbols.remove(left + 1);
            symbols[left].push_str(&right);
        }
        symbols.iter().map(|symbol| merges.tokens[symbol.as_str()].0).collect()
    }

    proptest! {
        #[test]
        fn agrees_with_the_definition(
            text in "[abc]{0,24}",
            words in prop::collection::btree_map("[abc]{2,5}", -4..4i32, 0..24),
        ) {
            let mut tokens: Vec<(&str, f32)> = vec![("a", 0.0), ("b", 0.0), ("c", 0.0)];
            tokens.extend(words.iter().map(|(word, score)| (word.as_str(), *score as f32)));
            let merges = merges(&tokens, None);
            prop_assert_eq!(encode(&merges, &text).unwrap(), naive(&merges, &text));
        }
    }

    #[test]
    fn falls_back_to_bytes_then_unknown_then_an_error() {
        let with_bytes = merges(&[("a", 0.0), ("<0xC3>", 0.0), ("<0xA9>", 0.0), ("?", 0.0)], Some(3));
        assert_eq!(encode(&with_bytes, "aé").unwrap(), [0, 1, 2]);
        assert_eq!(encode(&with_bytes, "aü").unwrap(), [0, 3]);
        let without = merges(&[("a", 0.0)], None);
        assert_eq!(
            encode(&without, "aü").unwrap_err().to_string(),
            "the vocabulary has no token for 'ü', no byte tokens and no unknown token"
        );
    }

    #[test]
    fn scores_that_are_not_numbers_do_no_harm() {
        let merges = merges(&[("a", f32::NAN), ("aa", f32::NAN), ("aaa", f32::INFINITY)], None);
        assert_eq!(encode(&merges, "aaaa").unwrap().len(), 2);
    }
}
