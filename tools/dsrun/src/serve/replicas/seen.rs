//! Which engine has processed the beginnings of prompts.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
};

/// Tokens of the pieces that prompts are compared by.
const PIECE: usize = 64;
/// The most pieces that are remembered. Beyond it, those seen longest ago are forgotten.
const MAX_PIECES: usize = 65_536;
/// The most requests that an engine may have above the least busy one to still get requests whose prompts it knows.
const SLACK: usize = 4;

/// The engine that has processed each known beginning of a prompt.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// By the hash of all tokens up to the end of a piece: the engine, and the time of its last request with them.
    pieces: HashMap<u64, (usize, u64)>,
    clock: u64,
}

impl Seen {
    /// Chooses an engine for a prompt, given the load of each, and remembers the choice. Engines without a load are not chosen.
    pub(super) fn choose(&mut self, prompt: &[u32], loads: &[Option<usize>]) -> usize {
        let mut hasher = DefaultHasher::new();
        let hash = |piece: &[u32]| {
            piece.hash(&mut hasher);
            hasher.finish()
        };
        let hashes: Vec<u64> = prompt.chunks_exact(PIECE).map(hash).collect();
        let known = hashes.iter().map_while(|hash| self.pieces.get(hash)).last().map(|seen| seen.0);
        let open = loads.iter().enumerate().filter_map(|(index, load)| Some((index, (*load)?)));
        let (least, least_load) = open.min_by_key(|(_, load)| *load).unwrap_or((0, 0));
        let fits = |known: &usize| loads[*known].is_some_and(|load| load <= least_load + SLACK);
        let chosen = known.filter(fits).unwrap_or(least);
        self.clock += 1;
        if self.pieces.len() + hashes.len() > MAX_PIECES {
            self.forget();
        }
        // A prompt of more pieces than are remembered is remembered by its beginning.
        self.pieces.extend(hashes.into_iter().take(MAX_PIECES / 2).map(|hash| (hash, (chosen, self.clock))));
        chosen
    }

    /// Forgets what an engine has processed.
    pub(super) fn forget_engine(&mut self, index: usize) {
        self.pieces.retain(|_, seen| seen.0 != index);
    }

    /// Forgets the half of the pieces that was seen longest ago.
    fn forget(&mut self) {
        let mut times: Vec<u64> = self.pieces.values().map(|seen| seen.1).collect();
        let middle = times.len() / 2;
        if let Some(median) = times.get(middle).is_some().then(|| *times.select_nth_unstable(middle).1) {
            self.pieces.retain(|_, seen| seen.1 > median);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(first: u32, tokens: usize) -> Vec<u32> {
        (0..tokens as u32).map(|index| first + index).collect()
    }

    fn loads<const N: usize>(loads: [usize; N]) -> [Option<usize>; N] {
        loads.map(Some)
    }

    #[test]
    fn unknown_prompts_go_to_the_least_busy_engine() {
        let mut seen = Seen::default();
        assert_eq!(seen.choose(&prompt(0, 200), &loads([3, 1, 2])), 1);
        assert_eq!(seen.choose(&prompt(1000, 10), &loads([3, 1, 0])), 2);
    }

    #[test]
    fn known_prefixes_go_to_their_engine_unless_it_is_too_busy() {
        let mut seen = Seen::default();
        assert_eq!(seen.choose(&prompt(0, 200), &loads([1, 0])), 1);
        // The first piece is the same, the rest differs.
        let mut alike = prompt(0, 64);
        alike.extend(prompt(5000, 100));
        assert_eq!(seen.choose(&alike, &loads([0, SLACK])), 1);
        assert_eq!(seen.choose(&alike, &loads([0, SLACK + 1])), 0);
        // From here on the other engine knows it, too.
        assert_eq!(seen.choose(&alike, &loads([0, 0])), 0);
        // A prefix shorter than a piece is not known.
        assert_eq!(seen.choose(&prompt(0, 63), &loads([1, 0])), 1);
    }

    #[test]
    fn an_engine_out_of_rotation_is_not_chosen() {
        let mut seen = Seen::default();
        assert_eq!(seen.choose(&prompt(0, 200), &loads([1, 0])), 1);
        assert_eq!(seen.choose(&prompt(0, 200), &[Some(9), None]), 0);
        assert_eq!(seen.choose(&prompt(0, 200), &loads([1, 0])), 0);
        // A rebuilt engine has lost its cache.
        seen.forget_engine(0);
        assert_eq!(seen.choose(&prompt(0, 200), &loads([1, 0])), 1);
    }

    #[test]
    fn memory_is_bounded() {
        let mut seen = Seen::default();
        for first in 0..1000 {
            seen.choose(&prompt(first, 200 * PIECE), &loads([0, 0]));
            assert!(seen.pieces.len() <= MAX_PIECES);
        }
        seen.choose(&prompt(7, 2 * MAX_PIECES * PIECE), &loads([0, 0]));
        assert!(seen.pieces.len() <= MAX_PIECES);
    }
}
