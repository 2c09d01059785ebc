//! `dsrun bench`: measures speed.

mod abi;
mod bandwidth;
mod kernels;
mod latency;
mod plot;
mod prefill;
mod serve;
mod soak;
mod throughput;

use crate::{
    arguments::{Bench, BenchCommand},
    terminal::Terminal,
};
use anyhow::Result;
use rand::{Rng, rngs::StdRng};
pub(crate) use serve::Lengths;

pub(crate) fn run(command: &Bench, terminal: &Terminal) -> Result<()> {
    match &command.command {
        BenchCommand::Latency(command) => latency::run(command, terminal),
        BenchCommand::Abi(command) => abi::run(command, terminal),
        BenchCommand::Prefill(command) => prefill::run(command, terminal),
        BenchCommand::Throughput(command) => throughput::run(command, terminal),
        BenchCommand::Kernels(command) => kernels::run(command, terminal),
        BenchCommand::Serve(command) => serve::run(command, terminal),
        BenchCommand::Plot(command) => plot::run(command, terminal),
        BenchCommand::Soak(command) => soak::run(command, terminal),
    }
}

/// The synthetic prompt of request number `request`.
fn prompt(request: usize, tokens: usize, vocabulary: usize) -> Vec<u32> {
    (0..tokens).map(|index| token(request * tokens + index, vocabulary)).collect()
}

/// A pseudorandom token, the same in every run.
fn token(index: usize, vocabulary: usize) -> u32 {
    let mixed = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
    (mixed % vocabulary.max(1) as u64) as u32
}

/// The words of text prompts, each of which is one token in common vocabularies.
const WORDS: [&str; 16] = [
    "time", "people", "water", "house", "river", "light", "music", "paper", "north", "field", "stone",
    "green", "table", "small", "world", "night",
];

/// A text of `count` random words.
fn words(random: &mut StdRng, count: usize) -> String {
    let words: Vec<&str> = (0..count).map(|_| WORDS[random.random_range(0..WORDS.len())]).collect();
    words.join(" ")
}

/// The upper median of the values; NaN without values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
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

    #[test]
    fn the_median_is_the_middle_value() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
    }
}
