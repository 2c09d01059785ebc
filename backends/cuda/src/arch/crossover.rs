//! The message sizes at which collectives switch to another algorithm.
//!
//! Measured with `dsrun bench all-reduce` on the machines of `docs/src/parallelism.md`.

use dsrun_core::op::Op;

/// The algorithms of an all-reduce by peer exchange: `kernels/collective/` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Algorithm {
    /// Every rank receives every message and reduces all of it: one exchange.
    OneShot,
    /// Every rank reduces a part of the messages, and sends the result to all others: two exchanges of fewer bytes.
    TwoShots,
    /// The same in chunks with a mark each instead of packets with flags: half the bytes.
    InChunks,
}

/// The maximum message sizes, in bytes per rank, of the algorithms of an all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Crossover {
    one_shot: usize,
    two_shots: usize,
    /// Larger messages use NCCL.
    in_chunks: usize,
}

/// Rows of: the maximum number of ranks, and the sizes for it. Measured for two and four ranks; that for more is a guess.
const TABLE: [(usize, Crossover); 3] = [
    (2, Crossover { one_shot: 256 << 10, two_shots: 512 << 10, in_chunks: usize::MAX }),
    (4, Crossover { one_shot: 64 << 10, two_shots: 512 << 10, in_chunks: usize::MAX }),
    (usize::MAX, Crossover { one_shot: 64 << 10, two_shots: 512 << 10, in_chunks: usize::MAX }),
];

/// The maximum size of other collectives by peer exchange; larger messages use NCCL. Packets carry as many bytes of flags as of
/// data, so they copy large messages at half the speed of a link.
const COPIED: usize = 512 << 10;

/// The sizes for a group of this many ranks.
fn crossover(ranks: usize) -> Crossover {
    let row = TABLE.iter().find(|(most, _)| ranks <= *most);
    row.map_or(Crossover { one_shot: 0, two_shots: 0, in_chunks: 0 }, |(_, row)| *row)
}

/// The algorithm of an all-reduce of `bytes` bytes by peer exchange.
pub(crate) fn algorithm(bytes: usize, ranks: usize) -> Algorithm {
    let Crossover { one_shot, two_shots, .. } = crossover(ranks);
    match bytes {
        _ if bytes <= one_shot => Algorithm::OneShot,
        _ if bytes <= two_shots => Algorithm::TwoShots,
        _ => Algorithm::InChunks,
    }
}

/// Whether an op of `bytes` bytes uses peer exchange when NCCL is available, too.
pub(crate) fn by_peers(op: &Op, bytes: usize, ranks: usize) -> bool {
    match op {
        Op::AllReduce(_) => bytes <= crossover(ranks).in_chunks,
        // Few messages are small.
        Op::Send(_) | Op::Receive(_) | Op::Barrier(_) => bytes <= COPIED / 2,
        _ => bytes <= COPIED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_messages_and_more_ranks_leave_the_one_shot() {
        let sizes: Vec<usize> = [2, 3, 4, 8].map(|ranks| crossover(ranks).one_shot).into();
        assert!(sizes.is_sorted_by(|a, b| a >= b), "{sizes:?}");
        for ranks in [2, 3, 4, 8] {
            let algorithms = [16 << 10, 16 << 20].map(|bytes| algorithm(bytes, ranks));
            assert_eq!(algorithms, [Algorithm::OneShot, Algorithm::InChunks], "{ranks} ranks");
        }
    }
}
