//! The sizes that steps are compiled for.

use super::step_interface::StepSize;

/// The sizes that one compiled step has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct Bucket {
    /// The maximum number of tokens.
    pub(crate) tokens: usize,
    /// The maximum number of sequences.
    pub(crate) sequences: usize,
    /// The maximum number of output rows: rows whose logits are needed.
    pub(crate) rows: usize,
    /// Whether every row of the step is an output row, or the step has a single token. No gather of output rows is needed then.
    pub(crate) all_rows: bool,
}

/// Sizes up to this are rounded up to powers of two, larger ones to quarters of the distance between powers of two: kernels may
/// compute all rows of the bucket, so padding costs time that grows with the size.
const FINER_ABOVE: usize = 1024;

/// The size of the bucket with room for `size`, within the limit.
fn rounded(size: usize, limit: usize) -> usize {
    let power = size.max(1).next_power_of_two();
    let step = if power > FINER_ABOVE { power / 8 } else { power };
    size.max(1).next_multiple_of(step).min(limit.max(1))
}

/// All sizes up to a limit that steps are compiled for.
fn sizes_up_to(limit: usize) -> impl Iterator<Item = usize> {
    let next = move |size: &usize| (*size < limit).then(|| rounded(size + 1, limit));
    std::iter::successors(Some(rounded(1, limit)), next)
}

impl Bucket {
    /// The bucket of a step: each size rounded up, within the limits.
    pub(crate) fn for_step(tokens: usize, sequences: usize, rows: usize, limits: Self) -> Self {
        let sequences = rounded(sequences, limits.sequences);
        if tokens == rows || tokens == 1 {
            let tokens = rounded(tokens, limits.tokens.min(limits.rows));
            return Self { tokens, sequences, rows: tokens, all_rows: true };
        }
        let (tokens, rows) = (rounded(tokens, limits.tokens), rounded(rows, limits.rows));
        Self { tokens, sequences, rows, all_rows: false }
    }

    /// Every bucket that a step within the limits can have, with at least a token for each sequence and each output row, and at
    /// most `rows` output rows for a sequence.
    pub(crate) fn all(limits: Self, rows: usize) -> Vec<Self> {
        let mut buckets = Vec::new();
        for sequences in sizes_up_to(limits.sequences) {
            for rows in sizes_up_to(rounded(sequences * rows, limits.rows)) {
                if (sequences..=limits.tokens).contains(&rows) {
                    buckets.push(Self { tokens: rows, sequences, rows, all_rows: true });
                }
                // A step of a single token uses a bucket with `all_rows`.
                let enough = |tokens: &usize| *tokens > 1 && *tokens >= sequences.max(rows);
                let enough = sizes_up_to(limits.tokens).filter(enough);
                buckets.extend(enough.map(|tokens| Self { tokens, sequences, rows, all_rows: false }));
            }
        }
        buckets
    }

    /// The sizes of the bucket by their names in programs.
    pub(crate) fn sizes(self, fixed: FixedSizes) -> impl Fn(&str) -> Option<usize> {
        move |name| {
            Some(match StepSize::from_name(name)? {
                StepSize::Tokens => self.tokens,
                StepSize::Sequences => self.sequences,
                StepSize::Rows => self.rows,
                StepSize::Requests => fixed.requests,
                StepSize::Blocks => fixed.blocks,
                StepSize::Pages => fixed.pages,
                StepSize::StopIds => fixed.stop_ids,
            })
        }
    }
}

/// Sizes that are the same in every step of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FixedSizes {
    /// Rows of the request table.
    pub(crate) requests: usize,
    /// Pages that one request can have.
    pub(crate) blocks: usize,
    /// Pages of the KV cache.
    pub(crate) pages: usize,
    /// Tokens that finish a request.
    pub(crate) stop_ids: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_fits_one_of_the_buckets() {
        for (each, most) in [(1, 6), (3, 18), (5, 30), (64, 48)] {
            let limits = Bucket { tokens: 48, sequences: 6, rows: most, all_rows: false };
            let buckets = Bucket::all(limits, each);
            for sequences in 1..=limits.sequences {
                for rows in 1..=(sequences * each).min(most) {
                    for tokens in sequences.max(rows)..=limits.tokens {
                        let bucket = Bucket::for_step(tokens, sequences, rows, limits);
                        assert_eq!(bucket.all_rows, tokens == rows);
                        assert!(buckets.contains(&bucket), "{bucket:?} for {tokens} {sequences} {rows}");
                    }
                }
            }
        }
    }

    #[test]
    fn large_sizes_are_rounded_to_finer_steps() {
        let sizes: Vec<usize> = sizes_up_to(5000).collect();
        let powers = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
        let finer = [1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5000];
        assert_eq!(sizes, [&powers[..], &finer[..]].concat());
        for size in 1..=5000 {
            assert_eq!(Some(&rounded(size, 5000)), sizes.iter().find(|room| **room >= size), "{size}");
        }
    }
}
