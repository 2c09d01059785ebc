//! Attention, over the paged cache and without it.
//!
//! The unit of work is a tile, a few query rows of one sequence, and a KV head. It walks over the keys in runs that lie
//! side by side in memory, and keeps for every query head a running maximum, sum and weighted sum of values ([`softmax`]).
//! Where runs end depends on the positions of keys alone, so a row's result does not depend on the rows around it.

mod softmax;

use crate::{
    floats::{FloatFrame, FloatOutput, Floats, SharedFloats},
    kernel::Kernel,
    parallel::{Lane, Team, Worker},
};
use dsrun_core::{
    Result,
    op::{Attention, AttentionMask, AttentionPrepare, PagedAttention},
};
use dsrun_host::{Frame, Tensor};
use softmax::{RUN, Scores, State};

/// Query rows of a tile: enough to use keys more than once while they are in the cache.
const TILE_ROWS: usize = 16;

/// The owner of rows that belong to no sequence.
const NO_SEQUENCE: u32 = u32::MAX;

/// Consecutive query rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile {
    first_row: usize,
    rows: usize,
    sequence: usize,
}

/// The rows and keys of a sequence.
#[derive(Clone, Copy, Debug)]
struct Sequence {
    /// Its first query row.
    first_row: usize,
    /// Query rows according to its query length.
    queries: usize,
    /// Position of its first query row; negative if there are fewer keys than queries.
    first_position: i64,
    /// Keys that can be read.
    keys: usize,
}

/// The place of the keys of a sequence.
trait KeySource: Sync {
    /// The sequence at `index`; `None` if it has no rows.
    fn sequence(&self, index: usize) -> Option<Sequence>;

    /// The number of keys from `key` on that are contiguous in memory, and the offsets of the first key and its value; `None` for
    /// offsets if these keys have no page.
    fn run(&self, sequence: usize, head: usize, key: usize) -> (usize, Option<(usize, usize)>);
}

impl Kernel for AttentionPrepare {
    fn run(&self, frame: &Frame<'_>, _: &mut Worker<'_>) -> Result<()> {
        // This backend asks for no work list; one that is bound anyway holds zeros.
        frame.output::<i32>(0)?.data.fill(0);
        Ok(())
    }
}

/// Keys in pages.
struct Paged<'a> {
    query_start: Tensor<'a, &'a [i32]>,
    query_length: Tensor<'a, &'a [i32]>,
    kv_length: Tensor<'a, &'a [i32]>,
    block_table: Tensor<'a, &'a [i32]>,
    pages: usize,
    block: usize,
    key_strides: &'a [usize],
    value_strides: &'a [usize],
}

impl KeySource for Paged<'_> {
    fn sequence(&self, index: usize) -> Option<Sequence> {
        let first_row = usize::try_from(self.query_start.at(index)).ok()?;
        let queries = usize::try_from(self.query_length.at(index)).ok()?;
        let length = self.kv_length.at(index);
        let room = self.block_table.width().saturating_mul(self.block);
        Some(Sequence {
            first_row,
            queries,
            first_position: i64::from(length) - queries as i64,
            keys: usize::try_from(length).unwrap_or(0).min(room),
        })
    }

    fn run(&self, sequence: usize, head: usize, key: usize) -> (usize, Option<(usize, usize)>) {
        let slot = key % self.block;
        let page = usize::try_from(self.block_table.row(sequence)[key / self.block]).ok();
        let page = page.filter(|page| *page < self.pages);
        let place = |strides: &[usize], page| page * strides[0] + head * strides[1] + slot * strides[2];
        (self.block - slot, page.map(|page| (place(self.key_strides, page), place(self.value_strides, page))))
    }
}

impl Kernel for PagedAttention {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (query, keys, values) = (frame.floats(0)?, frame.floats(1)?, frame.floats(2)?);
        let (&[_, _, block, key_size], &[_, _, _, value_size]) = (keys.shape, values.shape) else {
            return Ok(());
        };
        let source = Paged {
            query_start: frame.input(3)?,
            query_length: frame.input(4)?,
            kv_length: frame.input(5)?,
            block_table: frame.input(6)?,
            pages: keys.rows.min(values.rows),
            block: block.max(1),
            key_strides: keys.strides,
            value_strides: values.strides,
        };
        let alibi = frame.has(8).then(|| frame.input::<f32>(8)).transpose()?;
        let sinks = frame.has(9).then(|| frame.input::<f32>(9)).transpose()?;
        let bits = frame.has(10).then(|| frame.input::<u32>(10)).transpose()?;
        let (y, log_sum_exp) = (frame.floats_mut(0)?, frame.floats_mut(1)?);
        let mut rows = query.rows.min(y.rows).min(log_sum_exp.rows);
        if let Some(bits) = &bits {
            rows = rows.min(bits.rows);
        }
        let sequences = [&source.query_start, &source.query_length, &source.kv_length, &source.block_table]
            .map(|tensor| tensor.rows)
            .into_iter()
            .min();
        make_tiles(worker.owners, worker.tiles, rows, sequences.unwrap_or(0), |index| source.sequence(index));
        let problem = Problem {
            source,
            query,
            key: Operand { data: keys.data, stride: keys.strides[2], size: key_size },
            value: Operand { data: values.data, stride: values.strides[2], size: value_size },
            y: y.share(),
            log_sum_exp: Some(log_sum_exp.share()),
            kv_heads: self.kv_heads as usize,
            group: (self.query_heads / self.kv_heads.max(1)) as usize,
            scores: Scores { scale: self.scale, softcap: self.softcap, distance_is_absolute: false },
            window: self.window,
            window_ahead: false,
            mask: self.mask,
            alibi: alibi.as_ref().map(|alibi| alibi.row(0)),
            sinks: sinks.as_ref().map(|sinks| sinks.row(0)),
            bits,
        };
        problem.run(worker.tiles, &mut worker.team);
        Ok(())
    }
}

/// Keys in the rows of the same step.
struct Rows<'a> {
    start: Tensor<'a, &'a [i32]>,
    length: Tensor<'a, &'a [i32]>,
    rows: usize,
    key_stride: usize,
    value_stride: usize,
    key_size: usize,
    value_size: usize,
}

impl KeySource for Rows<'_> {
    fn sequence(&self, index: usize) -> Option<Sequence> {
        let first_row = usize::try_from(self.start.at(index)).ok()?;
        let queries = usize::try_from(self.length.at(index)).ok()?;
        let keys = queries.min(self.rows.saturating_sub(first_row));
        Some(Sequence { first_row, queries, first_position: 0, keys })
    }

    fn run(&self, sequence: usize, head: usize, key: usize) -> (usize, Option<(usize, usize)>) {
        let Some(sequence) = self.sequence(sequence) else { return (RUN, None) };
        let row = sequence.first_row + key;
        let place =
            (row * self.key_stride + head * self.key_size, row * self.value_stride + head * self.value_size);
        (sequence.keys - key, Some(place))
    }
}

impl Kernel for Attention {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (query, keys, values) = (frame.floats(0)?, frame.floats(1)?, frame.floats(2)?);
        let kv_heads = (self.kv_heads as usize).max(1);
        let (key_size, value_size) = (keys.width() / kv_heads, values.width() / kv_heads);
        let source = Rows {
            start: frame.input(3)?,
            length: frame.input(4)?,
            rows: keys.rows.min(values.rows),
            key_stride: keys.strides[0],
            value_stride: values.strides[0],
            key_size,
            value_size,
        };
        let alibi = frame.has(5).then(|| frame.input::<f32>(5)).transpose()?;
        let y = frame.floats_mut(0)?;
        let (rows, sequences) = (query.rows.min(y.rows), source.start.rows.min(source.length.rows));
        make_tiles(worker.owners, worker.tiles, rows, sequences, |index| source.sequence(index));
        let both_ways = self.mask == AttentionMask::Bidirectional;
        let problem = Problem {
            source,
            query,
            key: Operand { data: keys.data, stride: keys.strides[0], size: key_size },
            value: Operand { data: values.data, stride: values.strides[0], size: value_size },
            y: y.share(),
            log_sum_exp: None,
            kv_heads,
            group: self.query_heads as usize / kv_heads,
            scores: Scores { scale: self.scale, softcap: self.softcap, distance_is_absolute: both_ways },
            window: self.window,
            window_ahead: both_ways,
            mask: self.mask,
            alibi: alibi.as_ref().map(|alibi| alibi.row(0)),
            sinks: None,
            bits: None,
        };
        problem.run(worker.tiles, &mut worker.team);
        Ok(())
    }
}

/// Cuts the rows of all sequences into tiles. A row that two sequences claim goes to the first: so no row is in two tiles.
fn make_tiles(
    owners: &mut Vec<u32>,
    tiles: &mut Vec<Tile>,
    rows: usize,
    sequences: usize,
    sequence: impl Fn(usize) -> Option<Sequence>,
) {
    owners.clear();
    owners.resize(rows, NO_SEQUENCE);
    tiles.clear();
    for index in 0..sequences {
        let (Some(found), Ok(owner)) = (sequence(index), u32::try_from(index)) else { continue };
        let end = found.first_row.saturating_add(found.queries).min(rows);
        let claimed = owners.get_mut(found.first_row..end).into_iter().flatten();
        claimed.filter(|owner| **owner == NO_SEQUENCE).for_each(|slot| *slot = owner);
    }
    let mut first_row = 0;
    for run in owners.chunk_by(|a, b| a == b) {
        if let Some(owner) = run.first().filter(|owner| **owner != NO_SEQUENCE) {
            for start in (0..run.len()).step_by(TILE_ROWS) {
                let rows = TILE_ROWS.min(run.len() - start);
                tiles.push(Tile { first_row: first_row + start, rows, sequence: *owner as usize });
            }
        }
        first_row += run.len();
    }
}

/// Keys or values.
struct Operand<'a> {
    data: Floats<'a>,
    /// From one key to the next, in elements.
    stride: usize,
    /// Elements of a head.
    size: usize,
}

impl<'a> Operand<'a> {
    /// `count` keys from `start` on, and the stride from one to the next: in place if they are f32, else widened into
    /// `scratch`.
    fn load<'s>(&self, start: usize, count: usize, scratch: &'s mut [f32]) -> (&'s [f32], usize)
    where
        'a: 's,
    {
        if self.size == 0 || count == 0 {
            return (&[], 0);
        }
        if let Floats::F32(data) = self.data {
            return (&data[start..][..(count - 1) * self.stride + self.size], self.stride);
        }
        for (index, out) in scratch.chunks_exact_mut(self.size).take(count).enumerate() {
            self.data.widen(start + index * self.stride, out);
        }
        (scratch, self.size)
    }

    fn scratch(&self) -> usize {
        self.data.scratch(RUN * self.size)
    }
}

/// The parts of a call that do not depend on the tile.
struct Problem<'a, S> {
    source: S,
    query: Tensor<'a, Floats<'a>>,
    key: Operand<'a>,
    value: Operand<'a>,
    y: Tensor<'a, SharedFloats<'a>>,
    log_sum_exp: Option<Tensor<'a, SharedFloats<'a>>>,
    kv_heads: usize,
    /// Query heads of a KV head.
    group: usize,
    scores: Scores,
    window: u32,
    /// Whether the window also ends ahead of the query.
    window_ahead: bool,
    mask: AttentionMask,
    alibi: Option<&'a [f32]>,
    sinks: Option<&'a [f32]>,
    bits: Option<Tensor<'a, &'a [u32]>>,
}

impl<S: KeySource> Problem<'_, S> {
    fn run(&self, tiles: &[Tile], team: &mut Team<'_>) {
        let work =
            |tile: &Tile| tile.rows * self.source.sequence(tile.sequence).map_or(0, |sequence| sequence.keys);
        let pairs: usize = tiles.iter().map(work).sum();
        let per_pair = 2 * self.group * (self.key.size + self.value.size + 8);
        let cost = pairs.saturating_mul(per_pair) / tiles.len().max(1);
        team.for_each(tiles.len() * self.kv_heads, cost, |item, lane| {
            // Tiles with the most keys come last; starting with them keeps threads from waiting for one at the end.
            let index = tiles.len() * self.kv_heads - 1 - item;
            self.tile(tiles[index / self.kv_heads], index % self.kv_heads, lane);
        });
    }

    /// The keys a query at `position` may see, before the mask of explicit bits.
    fn visible(&self, position: i64, keys: usize) -> std::ops::Range<usize> {
        let window = i64::from(self.window);
        let mut end = if self.mask == AttentionMask::Causal { position.saturating_add(1) } else { i64::MAX };
        let mut start = 0;
        if window > 0 {
            start = position.saturating_sub(window - 1).max(0);
            if self.window_ahead {
                end = end.min(position.saturating_add(window));
            }
        }
        let end = usize::try_from(end).unwrap_or(0).min(keys);
        usize::try_from(start).unwrap_or(end).min(end)..end
    }

    /// All query heads of one KV head, for the rows of a tile.
    fn tile(&self, tile: Tile, kv_head: usize, lane: &mut Lane) {
        let Some(sequence) = self.source.sequence(tile.sequence) else { return };
        let (group, key_size, value_size) = (self.group, self.key.size, self.value.size);
        let heads = tile.rows * group;
        let sizes = [
            heads * key_size,
            heads * value_size,
            heads * State::FLOATS,
            RUN,
            self.key.scratch(),
            self.value.scratch(),
        ];
        lane.with_split(sizes, |[queries, sums, states, weights, key_scratch, value_scratch], lane| {
            let position =
                |row: usize| sequence.first_position + (tile.first_row + row - sequence.first_row) as i64;
            let range = |row: usize| self.visible(position(row), sequence.keys);
            sums.fill(0.0);
            for row in 0..tile.rows {
                let start = self.query.row_start(tile.first_row + row) + kv_head * group * key_size;
                let queries = &mut queries[row * group * key_size..][..group * key_size];
                if key_size > 0 {
                    self.query.data.widen(start, queries);
                }
                for head in 0..group {
                    let sink = self.sinks.map(|sinks| sinks[kv_head * group + head]);
                    State::new(sink).store(states, row * group + head);
                }
            }
            // Visible ranges grow and shrink with the position, so first and last row span them all.
            let (first, last) = (range(0), range(tile.rows - 1));
            let (mut key, end) = (first.start.min(last.start), first.end.max(last.end));
            // Runs start where they would if the tile saw all keys.
            key -= key % RUN;
            while key < end {
                let (length, place) = self.source.run(tile.sequence, kv_head, key);
                let count = length.min(RUN - key % RUN).min(end - key).max(1);
                if let Some((key_start, value_start)) = place {
                    let (keys, key_stride) = self.key.load(key_start, count, key_scratch);
                    let (values, value_stride) = self.value.load(value_start, count, value_scratch);
                    for row in 0..tile.rows {
                        let range = range(row);
                        let (start, end) = (range.start.max(key), range.end.min(key + count));
                        let visible =
                            |index: usize| self.has_bit(tile.first_row + row, index, sequence.first_position);
                        for_each_run(start, end, visible, |start, end| {
                            let (skipped, count) = (start - key, end - start);
                            let keys = &keys[(skipped * key_stride).min(keys.len())..];
                            let values = &values[(skipped * value_stride).min(values.len())..];
                            let ahead = position(row) - start as i64;
                            for head in 0..group {
                                let index = row * group + head;
                                let slope = self.alibi.map(|slopes| slopes[kv_head * group + head]);
                                let weights = &mut weights[..count];
                                let query = &queries[index * key_size..][..key_size];
                                self.scores.compute(query, keys, key_stride, slope, ahead, weights);
                                let sums = &mut sums[index * value_size..][..value_size];
                                let mut state = State::load(states, index);
                                state.absorb(weights, values, value_stride, sums);
                                state.store(states, index);
                            }
                        });
                    }
                }
                key += count;
            }
            for row in 0..tile.rows {
                self.finish(tile.first_row + row, kv_head, (row, sums, states), lane);
            }
        });
    }

    /// Whether explicit bits, if there are any, let a row see a key.
    fn has_bit(&self, row: usize, key: usize, step_start: i64) -> bool {
        let Some(bits) = &self.bits else { return true };
        let Ok(index) = usize::try_from(key as i64 - step_start) else { return true };
        bits.row(row).get(index / 32).is_some_and(|word| word >> (index % 32) & 1 == 1)
    }

    /// Divides by the sum of weights and writes the results.
    fn finish(
        &self,
        row: usize,
        kv_head: usize,
        (tile_row, sums, states): (usize, &[f32], &[f32]),
        lane: &mut Lane,
    ) {
        let (group, size) = (self.group, self.value.size);
        let first = tile_row * group;
        if size > 0 {
            let start = self.y.row_start(row) + kv_head * group * size;
            // SAFETY: every row is in one tile, and every tile meets each KV head once, so this range of this row is
            // written here only.
            unsafe {
                self.y.data.write(start, group * size, lane, |out, _| {
                    for (head, out) in out.chunks_exact_mut(size).enumerate() {
                        let state = State::load(states, first + head);
                        let sums = &sums[(first + head) * size..][..size];
                        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = state.weigh(*sum));
                    }
                });
            }
        }
        if let Some(log_sum_exp) = &self.log_sum_exp {
            let start = log_sum_exp.row_start(row) + kv_head * group;
            // SAFETY: as above.
            unsafe {
                log_sum_exp.data.write(start, group, lane, |out, _| {
                    for (head, out) in out.iter_mut().enumerate() {
                        *out = State::load(states, first + head).log_sum_exp();
                    }
                });
            }
        }
    }
}

/// Calls `work` with each longest part of `start..end` that is visible.
fn for_each_run(
    start: usize,
    end: usize,
    visible: impl Fn(usize) -> bool,
    mut work: impl FnMut(usize, usize),
) {
    let mut next = start;
    while next < end {
        let Some(first) = (next..end).find(|index| visible(*index)) else { return };
        next = (first..end).find(|index| !visible(*index)).unwrap_or(end);
        work(first, next);
    }
}
