//! The threads of a device, their scratch memory, and parallel loops over them.

use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of scalar operations below which waking other threads costs more than it saves.
const WORTH_SHARING: usize = 100_000;

/// Scratch memory that a device handle keeps from call to call, so that calls need not allocate.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// One per thread; at least one.
    lanes: Vec<Lane>,
    /// Small operands (weights of norms, biases), widened to f32.
    pub(crate) vectors: [Vec<f32>; 3],
    /// Activations of a linear layer, widened to f32.
    pub(crate) inputs: Vec<f32>,
    /// Results of a linear layer, before they are rounded.
    pub(crate) outputs: Vec<f32>,
    /// The sequence each row of a step belongs to.
    pub(crate) owners: Vec<u32>,
    /// The runs of query rows of a call of attention.
    pub(crate) tiles: Vec<QueryTile>,
    /// What attention computed for segments of keys.
    pub(crate) partials: Vec<f32>,
}

impl Scratch {
    pub(crate) fn new(threads: usize) -> Self {
        Self { lanes: (0..threads.max(1)).map(|_| Lane::default()).collect(), ..Self::default() }
    }
}

/// Consecutive query rows of one sequence, which attention works on at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueryTile {
    /// The first of the rows, counted over all sequences of the step.
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    /// The index of the sequence.
    pub(crate) sequence: usize,
}

/// Scratch memory of one thread.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    floats: Vec<f32>,
    row: Vec<f32>,
}

impl Lane {
    /// Disjoint slices of these lengths, with unspecified contents.
    pub(crate) fn split<const N: usize>(&mut self, lengths: [usize; N]) -> [&mut [f32]; N] {
        let total = lengths.iter().sum();
        if self.floats.len() < total {
            self.floats.resize(total, 0.0);
        }
        let mut rest = self.floats.as_mut_slice();
        lengths.map(|length| {
            let (slice, tail) = std::mem::take(&mut rest).split_at_mut(length);
            rest = tail;
            slice
        })
    }

    /// As [`Self::split`], for work that needs the lane besides.
    pub(crate) fn with_split<const N: usize>(
        &mut self,
        lengths: [usize; N],
        work: impl FnOnce([&mut [f32]; N], &mut Self),
    ) {
        let mut held = Self { floats: std::mem::take(&mut self.floats), row: Vec::new() };
        work(held.split(lengths), self);
        self.floats = held.floats;
    }

    /// Takes a row of this length out, to be used next to [`Self::split`]; [`Self::put_row`] gives it back.
    pub(crate) fn take_row(&mut self, length: usize) -> Vec<f32> {
        let mut row = std::mem::take(&mut self.row);
        if row.len() < length {
            row.resize(length, 0.0);
        }
        row
    }

    /// See [`Self::take_row`].
    pub(crate) fn put_row(&mut self, row: Vec<f32>) {
        self.row = row;
    }
}

/// The threads of a device, each with its scratch memory.
pub(crate) struct Team<'a> {
    pub(crate) pool: &'a rayon::ThreadPool,
    lanes: &'a mut [Lane],
}

impl Team<'_> {
    /// Runs `work` once for each of `0..count`, at about `cost` scalar operations each: in turn, or on all threads if that
    /// is worth it.
    pub(crate) fn for_each(&mut self, count: usize, cost: usize, work: impl Fn(usize, &mut Lane) + Sync) {
        let alone = self.lanes.len() < 2 || count < 2 || count.saturating_mul(cost) < WORTH_SHARING;
        if let (true, Some(lane)) = (alone, self.lanes.first_mut()) {
            (0..count).for_each(|index| work(index, lane));
            return;
        }
        // Threads take a few items at a time, which balances items of different cost.
        let grain = (count / (self.lanes.len() * 8)).max(1);
        let next = AtomicUsize::new(0);
        self.pool.install(|| {
            self.lanes.par_iter_mut().with_max_len(1).for_each(|lane| {
                loop {
                    let start = next.fetch_add(grain, Ordering::Relaxed);
                    if start >= count {
                        break;
                    }
                    (start..count.min(start + grain)).for_each(|index| work(index, lane));
                }
            });
        });
    }

    /// The number of threads.
    pub(crate) fn threads(&self) -> usize {
        self.lanes.len()
    }

    /// The scratch memory of the calling thread.
    pub(crate) fn lane(&mut self) -> &mut Lane {
        &mut self.lanes[0]
    }
}

/// The resources of a kernel besides its operands.
pub(crate) struct Worker<'a> {
    pub(crate) team: Team<'a>,
    pub(crate) vectors: &'a mut [Vec<f32>; 3],
    pub(crate) inputs: &'a mut Vec<f32>,
    pub(crate) outputs: &'a mut Vec<f32>,
    pub(crate) owners: &'a mut Vec<u32>,
    pub(crate) tiles: &'a mut Vec<QueryTile>,
    pub(crate) partials: &'a mut Vec<f32>,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(pool: &'a rayon::ThreadPool, scratch: &'a mut Scratch) -> Self {
        let Scratch { lanes, vectors, inputs, outputs, owners, tiles, partials } = scratch;
        Self { team: Team { pool, lanes }, vectors, inputs, outputs, owners, tiles, partials }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::sync::atomic::AtomicU32;

    #[rstest]
    fn every_item_is_done_once(
        #[values(0, 1, 2, 1000)] count: usize,
        #[values(1, 1_000_000)] cost: usize,
        #[values(1, 3)] threads: usize,
    ) {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut scratch = Scratch::new(threads);
        let done: Vec<AtomicU32> = (0..count).map(|_| AtomicU32::new(0)).collect();
        Worker::new(&pool, &mut scratch).team.for_each(count, cost, |index, _| {
            done[index].fetch_add(1, Ordering::Relaxed);
        });
        assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn a_lane_is_split_into_disjoint_slices() {
        let mut lane = Lane::default();
        let [a, b, c] = lane.split([2, 0, 3]);
        a.fill(1.0);
        c.fill(2.0);
        assert_eq!((&*a, b.len(), &*c), (&[1.0, 1.0][..], 0, &[2.0; 3][..]));
    }
}
