//! Prompt lookup decoding: finds the last n-gram of a text earlier in the text, and proposes the tokens that followed it there.
//!
//! Source: Saxena, "Prompt Lookup Decoding" (2023).

use std::collections::HashMap;

/// The lengths of n-grams that are looked up. Longer matches predict better, so they are tried first.
const LONGEST: usize = 3;
const SHORTEST: usize = 2;

/// An n-gram, padded with -1 at the front if it is shorter than [`LONGEST`].
type Ngram = [i32; LONGEST];

/// Proposes tokens for one request.
#[derive(Debug)]
pub(crate) struct PromptLookup {
    /// The index of the token after the latest occurrence of each n-gram.
    followed_at: HashMap<Ngram, u32>,
    /// The first token that is not indexed yet.
    next: usize,
    /// The number of tokens to propose. With 0 nothing is proposed until `guess` was correct once.
    length: usize,
    most: usize,
    /// The first token of the last draft, or of the draft that would have been made if `length` were not 0.
    guess: Option<i32>,
}

impl PromptLookup {
    /// Proposes up to `most` tokens at a time.
    pub(crate) fn new(most: usize) -> Self {
        Self { followed_at: HashMap::new(), next: 0, length: 1.min(most), most, guess: None }
    }

    /// Proposes tokens that follow a request's `tokens`, which extend those of the last call.
    pub(crate) fn propose(&mut self, tokens: &[i32]) -> Vec<i32> {
        if self.length == 0 && self.guess.is_some() && self.guess.as_ref() == tokens.last() {
            self.length = 1.min(self.most);
        }
        for place in self.next..tokens.len() {
            for ngram in ngrams(&tokens[..place]) {
                self.followed_at.insert(ngram, place as u32);
            }
        }
        self.next = tokens.len();
        let found = ngrams(tokens).find_map(|ngram| self.followed_at.get(&ngram).copied());
        let Some(start) = found.map(|place| place as usize) else {
            self.guess = None;
            return Vec::new();
        };
        self.guess = tokens.get(start).copied();
        let mut proposed = Vec::with_capacity(self.length);
        for place in start..start + self.length {
            // If the match reaches the end of the text, the draft continues with its own first tokens: a repeated pattern goes
            // on.
            let token = tokens.get(place).or_else(|| proposed.get(place - tokens.len())).copied();
            proposed.extend(token);
        }
        proposed
    }

    /// Adapts to the number of accepted tokens.
    pub(crate) fn learn(&mut self, proposed: usize, accepted: usize) {
        if accepted == proposed && proposed >= self.length {
            // A draft of 2^n - 1 tokens and the token before it fill a bucket of 2^n rows.
            self.length = (2 * self.length + 1).min(self.most);
        } else if 2 * accepted < proposed {
            self.length = proposed.min(self.length) / 2;
        }
    }
}

/// The n-grams at the end of a text, the longest first.
fn ngrams(tokens: &[i32]) -> impl Iterator<Item = Ngram> + '_ {
    (SHORTEST..=LONGEST).rev().filter_map(|length| {
        let mut ngram = [-1; LONGEST];
        ngram[LONGEST - length..].copy_from_slice(tokens.len().checked_sub(length).map(|at| &tokens[at..])?);
        Some(ngram)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lookup that proposes this many tokens next.
    fn lookup(length: usize) -> PromptLookup {
        PromptLookup { length, ..PromptLookup::new(7) }
    }

    #[test]
    fn the_tokens_that_followed_last_are_proposed() {
        assert_eq!(lookup(3).propose(&[1, 2, 3, 4, 1, 2, 5, 6, 7, 8, 1, 2]), [5, 6, 7]);
        // A match of three tokens takes precedence over one of two.
        assert_eq!(lookup(2).propose(&[9, 1, 2, 3, 4, 8, 1, 2, 5, 9, 1, 2]), [3, 4]);
        assert!(lookup(3).propose(&[1, 2, 3, 4, 5, 6]).is_empty());
        for short in 0..3 {
            assert!(lookup(3).propose(&[1, 1, 1][..short]).is_empty(), "{short} tokens");
        }
    }

    #[test]
    fn a_repetition_is_proposed_beyond_the_end() {
        assert_eq!(lookup(5).propose(&[7, 1, 2, 3, 1, 2, 3]), [1, 2, 3, 1, 2]);
        assert_eq!(lookup(4).propose(&[4, 4, 4]), [4; 4]);
    }

    #[test]
    fn tokens_may_arrive_one_by_one() {
        let tokens: Vec<i32> = (0..200).map(|place| place * place % 7 % 3).collect();
        let mut growing = lookup(4);
        for end in 0..tokens.len() {
            assert_eq!(growing.propose(&tokens[..end]), lookup(4).propose(&tokens[..end]), "{end} tokens");
        }
    }

    #[test]
    fn the_length_follows_acceptance() {
        let mut lookup = PromptLookup::new(7);
        let lengths =
            [(1, 1, 3), (3, 3, 7), (7, 7, 7), (7, 4, 7), (7, 3, 3), (2, 2, 3), (3, 1, 1), (1, 0, 0)];
        for (proposed, accepted, length) in lengths {
            lookup.learn(proposed, accepted);
            assert_eq!(lookup.length, length, "{accepted} of {proposed} accepted");
        }
        // Proposals resume after a correct guess.
        assert!(lookup.propose(&[5, 6, 7, 5, 6]).is_empty());
        assert!(lookup.propose(&[5, 6, 7, 5, 6, 1]).is_empty());
        assert!(lookup.propose(&[5, 6, 7, 5, 6, 1, 5, 6]).is_empty());
        assert_eq!(lookup.propose(&[5, 6, 7, 5, 6, 1, 5, 6, 1]), [5]);
    }
}
