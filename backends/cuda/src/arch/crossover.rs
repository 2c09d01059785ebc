//! From which size on a collective takes another way.
//!
//! **Not measured yet**: there was no machine with two GPUs. The numbers rest on what others have published for 8 H200 on one host (an
//! all-reduce by stores of flagged packets takes 6.4 us for 16 KiB, 8.2 us for 64 KiB and 10.6 us for 256 KiB, NCCL 17.8, 19.9 and
//! 20.3 us), and on what each way moves: in one shot a rank sends its whole message to every other one, and packets carry as many bytes
//! of flags as of data, so its time grows twice as fast as NCCL's from where the links are busy.

use dsrun_core::op::Op;

/// The most bytes of a rank that take the ways of small messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Crossover {
    /// An all-reduce in one shot: every rank gets every message and reduces all of it.
    pub(crate) one_shot: usize,
    /// The peer exchange; NCCL beyond.
    pub(crate) peer: usize,
}

/// Ranks up to which a row counts, and its sizes.
const TABLE: [(usize, Crossover); 3] = [
    // With two ranks, two shots send as many bytes as one.
    (2, Crossover { one_shot: usize::MAX, peer: 512 << 10 }),
    (4, Crossover { one_shot: 128 << 10, peer: 512 << 10 }),
    (usize::MAX, Crossover { one_shot: 64 << 10, peer: 512 << 10 }),
];

/// The sizes for a group of so many ranks.
pub(crate) fn crossover(ranks: usize) -> Crossover {
    let row = TABLE.iter().find(|(most, _)| ranks <= *most);
    row.map_or(Crossover { one_shot: 0, peer: 0 }, |(_, row)| *row)
}

/// Whether an op of so many bytes goes by peer exchange where NCCL is there too.
pub(crate) fn by_peers(op: &Op, bytes: usize, ranks: usize) -> bool {
    match op {
        // A message is copied by packets at half the speed of the link, and few are small.
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
