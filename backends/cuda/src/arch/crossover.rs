//! The message sizes at which collectives switch to another algorithm.
//!
//! **Not measured yet**: there was no machine with two GPUs. The numbers are based on published measurements of 8 H200 on one
//! host (an all-reduce by stores of flagged packets takes 6.4 us for 16 KiB, 8.2 us for 64 KiB and 10.6 us for 256 KiB, NCCL
//! 17.8, 19.9 and 20.3 us), and on the bytes each algorithm moves: in one shot a rank sends its whole message to every other
//! rank, and packets contain as many bytes of flags as of data, so once the links are saturated its time grows twice as fast as
//! NCCL's.

use dsrun_core::op::Op;

/// The maximum message sizes, in bytes per rank, of the algorithms for small messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Crossover {
    /// One-shot all-reduce: every rank receives every message and reduces all of it.
    pub(crate) one_shot: usize,
    /// Peer exchange; larger messages use NCCL.
    pub(crate) peer: usize,
}

/// Rows of: the maximum number of ranks, and the sizes for it.
const TABLE: [(usize, Crossover); 3] = [
    // With two ranks, the two-shot algorithm sends as many bytes as one-shot.
    (2, Crossover { one_shot: usize::MAX, peer: 512 << 10 }),
    (4, Crossover { one_shot: 128 << 10, peer: 512 << 10 }),
    (usize::MAX, Crossover { one_shot: 64 << 10, peer: 512 << 10 }),
];

/// The sizes for a group of this many ranks.
pub(crate) fn crossover(ranks: usize) -> Crossover {
    let row = TABLE.iter().find(|(most, _)| ranks <= *most);
    row.map_or(Crossover { one_shot: 0, peer: 0 }, |(_, row)| *row)
}

/// Whether an op of `bytes` bytes uses peer exchange when NCCL is available, too.
pub(crate) fn by_peers(op: &Op, bytes: usize, ranks: usize) -> bool {
    match op {
        // Packets copy a message at half the speed of the link, and few messages are small.
        Op::Send(_) | Op::Receive(_) | Op::Barrier(_) => bytes <= crossover(ranks).peer / 2,
        _ => bytes <= crossover(ranks).peer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_ranks_leave_the_one_shot_earlier() {
        let sizes: Vec<usize> = [2, 3, 4, 8].map(|ranks| crossover(ranks).one_shot).into();
        assert!(sizes.is_sorted_by(|a, b| a >= b), "{sizes:?}");
        assert_eq!(crossover(2).one_shot, usize::MAX);
    }
}
