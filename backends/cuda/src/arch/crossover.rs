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
    /// The same, but ranks read each other's operands and write each other's results directly: half the bytes.
    Direct,
}

/// The maximum size of other collectives by peer exchange; larger messages use NCCL. Packets carry as many bytes of flags as of
/// data, so they copy large messages at half the speed of a link.
const COPIED: usize = 512 << 10;

/// The maximum message sizes, in bytes per rank, of one shot and of two shots. Measured for two and four ranks; that for more is a
/// guess.
fn limits(ranks: usize) -> [usize; 2] {
    match ranks {
        ..=2 => [256 << 10, 512 << 10],
        _ => [64 << 10, 512 << 10],
    }
}

/// The algorithm of an all-reduce of `bytes` bytes by peer exchange.
pub(crate) fn algorithm(bytes: usize, ranks: usize) -> Algorithm {
    let [one_shot, two_shots] = limits(ranks);
    match bytes {
        _ if bytes <= one_shot => Algorithm::OneShot,
        _ if bytes <= two_shots => Algorithm::TwoShots,
        _ => Algorithm::Direct,
    }
}

/// Whether an op of `bytes` bytes uses peer exchange when NCCL is available, too.
pub(crate) fn by_peers(op: &Op, bytes: usize) -> bool {
    match op {
        // Within a step, this is faster than NCCL at every size.
        Op::AllReduce(_) => true,
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
        let sizes: Vec<usize> = [2, 3, 4, 8].map(|ranks| limits(ranks)[0]).into();
        assert!(sizes.is_sorted_by(|a, b| a >= b), "{sizes:?}");
        for ranks in [2, 3, 4, 8] {
            let algorithms = [16 << 10, 16 << 20].map(|bytes| algorithm(bytes, ranks));
            assert_eq!(algorithms, [Algorithm::OneShot, Algorithm::Direct], "{ranks} ranks");
        }
    }
}
