//! Prompt lookup: what follows now may be what followed the same tokens before.
//!
//! Source: Saxena, "Prompt Lookup Decoding" (2023).

use std::collections::HashMap;

/// The most tokens that are looked up, and the fewest. The more agree, the better the guess, so they go first.
const LONGEST: usize = 3;
const SHORTEST: usize = 2;

/// Tokens to look up, behind -1 if they are fewer than [`LONGEST`].
type Gram = [i32; LONGEST];

/// Proposes tokens for one request.
#[derive(Debug)]
pub(crate) struct PromptLookup {
    /// What stood last behind each gram: places of tokens.
    followed_at: HashMap<Gram, u32>,
    /// The first token that was not looked at yet.
    next: usize,
    /// Tokens to propose at a time. With 0 nothing is proposed until a guess turns out to be right.
    length: usize,
    most: usize,
    /// What would have been proposed.
    guess: Option<i32>,
}

impl PromptLookup {
    /// Proposes `most` tokens at a time, or fewer.
    pub(crate) fn new(most: usize) -> Self {
        Self { followed_at: HashMap::new(), next: 0, length: 1.min(most), most, guess: None }
    }

    /// What may follow a request's tokens. They are the same as last time, but for those behind.
    pub(crate) fn propose(&mut self, tokens: &[i32]) -> Vec<i32> {
        if self.length == 0 && self.guess.is_some() && self.guess.as_ref() == tokens.last() {
            self.length = 1.min(self.most);
        }
        for place in self.next..tokens.len() {
            for gram in grams(&tokens[..place]) {
                self.followed_at.insert(gram, place as u32);
            }
        }
        self.next = tokens.len();
        let found = grams(tokens).find_map(|gram| self.followed_at.get(&gram).copied());
        let Some(start) = found.map(|place| place as usize) else {
            self.guess = None;
            return Vec::new();
        };
        self.guess = tokens.get(start).copied();
        let mut proposed = Vec::with_capacity(self.length);
        for place in start..start + self.length {
            // What repeats itself goes on doing so: behind the end comes what is proposed.
            let token = tokens.get(place).or_else(|| proposed.get(place - tokens.len())).copied();
            proposed.extend(token);
        }
        proposed
    }

    /// Learns how many of the tokens proposed were right.
    pub(crate) fn learn(&mut self, proposed: usize, right: usize) {
        if right == proposed && proposed >= self.length {
            // With the token in front of them, proposals fill steps of a power of two.
            self.length = (2 * self.length + 1).min(self.most);
        } else if 2 * right < proposed {
            self.length = proposed.min(self.length) / 2;
        }
    }
}

/// The last tokens, the most of them first.
fn grams(tokens: &[i32]) -> impl Iterator<Item = Gram> + '_ {
    (SHORTEST..=LONGEST).rev().filter_map(|length| {
        let mut gram = [-1; LONGEST];
        gram[LONGEST - length..].copy_from_slice(tokens.len().checked_sub(length).map(|at| &tokens[at..])?);
        Some(gram)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lookup that proposes so many tokens next.
    fn lookup(length: usize) -> PromptLookup {
        PromptLookup { length, ..PromptLookup::new(7) }
    }

    #[test]
    fn what_followed_last_is_proposed() {
        assert_eq!(lookup(3).propose(&[1, 2, 3, 4, 1, 2, 5, 6, 7, 8, 1, 2]), [5, 6, 7]);
        // Three that agree count more than two.
        assert_eq!(lookup(2).propose(&[9, 1, 2, 3, 4, 8, 1, 2, 5, 9, 1, 2]), [3, 4]);
        assert!(lookup(3).propose(&[1, 2, 3, 4, 5, 6]).is_empty());
        for short in 0..3 {
            assert!(lookup(3).propose(&[1, 1, 1][..short]).is_empty(), "{short} tokens");
        }
    }

    #[test]
    fn what_repeats_itself_is_proposed_beyond_its_end() {
        assert_eq!(lookup(5).propose(&[7, 1, 2, 3, 1, 2, 3]), [1, 2, 3, 1, 2]);
        assert_eq!(lookup(4).propose(&[4, 4, 4]), [4; 4]);
    }

    #[test]
    fn tokens_may_come_piece_by_piece() {
        let tokens: Vec<i32> = (0..200).map(|place| place * place % 7 % 3).collect();
        let mut growing = lookup(4);
        for end in 0..tokens.len() {
            assert_eq!(growing.propose(&tokens[..end]), lookup(4).propose(&tokens[..end]), "{end} tokens");
        }
    }

    #[test]
    fn the_length_follows_what_is_right() {
        let mut lookup = PromptLookup::new(7);
        let lengths =
            [(1, 1, 3), (3, 3, 7), (7, 7, 7), (7, 4, 7), (7, 3, 3), (2, 2, 3), (3, 1, 1), (1, 0, 0)];
        for (proposed, right, length) in lengths {
            lookup.learn(proposed, right);
            assert_eq!(lookup.length, length, "{right} of {proposed} right");
        }
        // It is tried again when a guess was right, which cost nothing.
        assert!(lookup.propose(&[5, 6, 7, 5, 6]).is_empty());
        assert!(lookup.propose(&[5, 6, 7, 5, 6, 1]).is_empty());
        assert!(lookup.propose(&[5, 6, 7, 5, 6, 1, 5, 6]).is_empty());
        assert_eq!(lookup.propose(&[5, 6, 7, 5, 6, 1, 5, 6, 1]), [5]);
    }
}
