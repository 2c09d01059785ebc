//! Divides a chain of pieces into stages by dynamic programming over the ends of stages.

/// The calls between two neighbouring cuts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Piece {
    /// The time of a step, in picoseconds.
    pub(super) time: u64,
    /// Bytes of weights and states.
    pub(super) memory: u64,
}

/// The division of `pieces` into `stages` stages whose slowest stage or transfer takes the least time; of these the one whose stages
/// are most even. Returns the first piece of each stage but the first, or `None` if no division keeps every stage within `limit`
/// bytes.
///
/// `transfers[i]` is the time to send over the cut after piece `i`; the last piece has none.
pub(super) fn balance(
    pieces: &[Piece],
    transfers: &[u64],
    stages: usize,
    limit: Option<u64>,
) -> Option<Vec<usize>> {
    let slowest = |begin: usize, end: usize| {
        let transfer = begin.checked_sub(1).map_or(0, |cut| transfers[cut]);
        stage_time(pieces, begin, end, limit).map(|time| time.max(transfer) as f64)
    };
    let bottleneck = best(pieces, stages, &slowest, f64::max)?.cost;
    // Minimising the sum of squares also balances the stages that are not the slowest.
    let square = |begin: usize, end: usize| {
        let time = stage_time(pieces, begin, end, limit)? as f64;
        (slowest(begin, end)? <= bottleneck).then_some(time * time)
    };
    let even = best(pieces, stages, &square, |a, b| a + b)?;
    Some(even.starts)
}

/// The time of a stage, if it fits.
fn stage_time(pieces: &[Piece], begin: usize, end: usize, limit: Option<u64>) -> Option<u64> {
    let own = &pieces[begin..end];
    let memory: u64 = own.iter().map(|piece| piece.memory).sum();
    limit.is_none_or(|limit| memory <= limit).then(|| own.iter().map(|piece| piece.time).sum())
}

/// A division of the first pieces.
#[derive(Clone, Debug)]
struct Division {
    cost: f64,
    /// The first piece of each stage but the first.
    starts: Vec<usize>,
}

/// The division of least cost. `cost(begin, end)` is the cost of a stage with these pieces, or `None` if it is not possible;
/// `join` adds the cost of a stage to that of the stages before it.
fn best(
    pieces: &[Piece],
    stages: usize,
    cost: &dyn Fn(usize, usize) -> Option<f64>,
    join: impl Fn(f64, f64) -> f64,
) -> Option<Division> {
    // The best division of the first pieces into one stage, then into two, and so on; by the number of pieces.
    let count = pieces.len();
    let mut known: Vec<Option<Division>> = (0..=count)
        .map(|end| (end > 0).then(|| cost(0, end)).flatten().map(|cost| Division { cost, starts: vec![] }))
        .collect();
    for _ in 1..stages {
        let divided = |end: usize| {
            let with_last_from = |begin: usize| {
                let before = known[begin].as_ref()?;
                let cost = join(before.cost, cost(begin, end)?);
                Some((cost, begin, before))
            };
            let (cost, begin, before) =
                (1..end).filter_map(with_last_from).min_by(|(a, ..), (b, ..)| a.total_cmp(b))?;
            let starts = before.starts.iter().copied().chain([begin]).collect();
            Some(Division { cost, starts })
        };
        known = (0..=count).map(divided).collect();
    }
    known.pop().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn pieces(times: &[u64]) -> Vec<Piece> {
        times.iter().map(|time| Piece { time: *time, memory: *time }).collect()
    }

    /// The bottleneck of a division.
    fn slowest(times: &[u64], starts: &[usize]) -> u64 {
        let ends = starts.iter().copied().chain([times.len()]);
        let begins = [0].into_iter().chain(starts.iter().copied());
        begins.zip(ends).map(|(begin, end)| times[begin..end].iter().sum()).max().unwrap()
    }

    /// Every division into stages, by brute force.
    fn all(count: usize, stages: usize) -> Vec<Vec<usize>> {
        if stages == 1 {
            return vec![vec![]];
        }
        let mut divisions = Vec::new();
        for last in stages - 1..count {
            for mut starts in all(last, stages - 1) {
                starts.push(last);
                divisions.push(starts);
            }
        }
        divisions
    }

    #[rstest]
    #[case(&[3, 3, 3, 3], 2)]
    #[case(&[1, 1, 1, 9], 2)]
    #[case(&[5, 1, 1, 1, 1, 1, 7], 3)]
    #[case(&[2, 9, 4, 4, 4, 1, 8, 3], 4)]
    #[case(&[2, 9, 4, 4, 4, 1, 8, 3], 8)]
    fn the_slowest_stage_is_as_fast_as_any_division_makes_it(#[case] times: &[u64], #[case] stages: usize) {
        let starts = balance(&pieces(times), &vec![0; times.len() - 1], stages, None).unwrap();
        assert_eq!(starts.len(), stages - 1);
        let best = all(times.len(), stages).iter().map(|starts| slowest(times, starts)).min().unwrap();
        assert_eq!(slowest(times, &starts), best, "{starts:?}");
    }

    #[test]
    fn stages_beside_the_slowest_are_even() {
        assert_eq!(balance(&pieces(&[1, 1, 1, 1, 50]), &[0; 4], 3, None).unwrap(), [2, 4]);
    }

    #[test]
    fn a_slow_transfer_is_avoided() {
        let times = [4, 4, 4, 4];
        assert_eq!(balance(&pieces(&times), &[0, 100, 0], 2, None).unwrap(), [1]);
    }

    #[test]
    fn memory_is_a_limit() {
        let mut uneven = pieces(&[1, 1, 1, 1]);
        uneven[0].memory = 10;
        assert_eq!(balance(&uneven, &[0; 3], 2, Some(10)).unwrap(), [1]);
        assert_eq!(balance(&uneven, &[0; 3], 2, Some(9)), None);
        assert_eq!(balance(&uneven, &[0; 3], 5, None), None, "more stages than pieces");
    }
}
