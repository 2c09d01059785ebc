//! Prompts for measurements: reproducible tokens, and text of short words.

use rand::{Rng, rngs::StdRng};

/// The synthetic prompt of request number `request`.
pub(super) fn prompt(request: usize, tokens: usize, vocabulary: usize) -> Vec<u32> {
    (0..tokens).map(|index| token(request * tokens + index, vocabulary)).collect()
}

/// A pseudorandom token, the same in every run.
pub(super) fn token(index: usize, vocabulary: usize) -> u32 {
    let mixed = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
    (mixed % vocabulary.max(1) as u64) as u32
}

/// The words of text prompts, each of which is one token in common vocabularies.
const WORDS: [&str; 16] = [
    "time", "people", "water", "house", "river", "light", "music", "paper", "north", "field", "stone",
    "green", "table", "small", "world", "night",
];

/// A text of `count` random words.
pub(super) fn words(random: &mut StdRng, count: usize) -> String {
    let words: Vec<&str> = (0..count).map(|_| WORDS[random.random_range(0..WORDS.len())]).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_distinct_tokens_of_the_vocabulary() {
        let tokens = prompt(0, 100, 1000);
        assert!(tokens.iter().all(|token| *token < 1000));
        let mut distinct = tokens.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() > 80);
        assert_ne!(prompt(1, 100, 1000), tokens);
    }
}
