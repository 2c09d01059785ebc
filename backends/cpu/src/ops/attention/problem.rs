//! The tiles of an attention, their segments of keys, and the results.

use super::{
    KeySource, QueryTile,
    softmax::{Scores, State},
};
use crate::{
    floats::{Floats, FloatsMut, SharedFloats},
    lanes::{InstructionSet, WIDTH},
    packed::temporary::Elements,
    parallel::{Lane, Team},
};
use dsrun_core::op::AttentionMask;
use dsrun_host::Tensor;
use std::ops::Range;

/// The maximum number of keys of a segment, a whole number of runs: enough that combining segments costs little.
const SEGMENT: usize = 256;

/// The number of work items (tiles times KV heads) per thread from which threads no longer split the keys of a tile.
const ITEMS_OF_A_THREAD: usize = 4;

/// Keys or values.
pub(super) struct Operand<'a> {
    pub(super) data: Elements<'a>,
    /// From one key to the next, in elements.
    pub(super) stride: usize,
    /// Elements of a head.
    pub(super) size: usize,
}

/// The parts of a call that do not depend on the tile.
pub(super) struct Problem<'a, S> {
    pub(super) source: S,
    pub(super) query: Tensor<'a, Floats<'a>>,
    pub(super) key: Operand<'a>,
    pub(super) value: Operand<'a>,
    pub(super) y: Tensor<'a, SharedFloats<'a>>,
    pub(super) log_sum_exp: Option<Tensor<'a, SharedFloats<'a>>>,
    pub(super) kv_heads: usize,
    /// Query heads of a KV head.
    pub(super) group: usize,
    pub(super) scores: Scores,
    pub(super) window: u32,
    /// Whether the window also ends ahead of the query.
    pub(super) window_ahead: bool,
    pub(super) mask: AttentionMask,
    pub(super) alibi: Option<&'a [f32]>,
    pub(super) sinks: Option<&'a [f32]>,
    pub(super) bits: Option<Tensor<'a, &'a [u32]>>,
    pub(super) instructions: InstructionSet,
}

/// The running softmax of the query heads of a tile.
pub(super) struct Partial<'a> {
    /// A [`State`] for each head.
    pub(super) states: &'a mut [f32],
    /// The weighted sum of values of each head, a whole number of vectors.
    pub(super) sums: &'a mut [f32],
}

impl<S: KeySource> Problem<'_, S> {
    /// Computes all results.
    pub(super) fn run(&self, tiles: &[QueryTile], team: &mut Team<'_>, partials: &mut Vec<f32>) {
        let work = |tile: &QueryTile| tile.rows * self.span(*tile).len();
        let pairs: usize = tiles.iter().map(work).sum();
        let per_pair = 2 * self.group * (self.key.size + self.value.size + 8);
        let items = tiles.len() * self.kv_heads;
        let cost = pairs.saturating_mul(per_pair) / tiles.len().max(1);
        let segments = tiles.iter().map(|tile| segments_of(&self.span(*tile)).len()).max().unwrap_or(0);
        if segments < 2 || items >= ITEMS_OF_A_THREAD * team.threads() {
            return team.for_each(items, cost, |item, lane| {
                // Tiles with the most keys come last; starting with them balances the threads.
                let index = items - 1 - item;
                self.tile(tiles[index / self.kv_heads], index % self.kv_heads, lane);
            });
        }
        // Few tiles of many keys, as in decode: threads split the keys of a tile.
        let heads = tiles.iter().map(|tile| tile.rows).max().unwrap_or(0) * self.group;
        let size = heads * self.head_floats();
        partials.resize((items * segments * size).max(partials.len()), 0.0);
        let shared = FloatsMut::F32(&mut *partials).share();
        team.for_each(items * segments, cost / segments, |index, lane| {
            let (item, segment) = (index / segments, index % segments);
            let (tile, kv_head) = (tiles[item / self.kv_heads], item % self.kv_heads);
            let Some(keys) = segments_of(&self.span(tile)).nth(segment) else { return };
            let used = tile.rows * self.group * self.head_floats();
            // SAFETY: every index has floats of its own.
            unsafe {
                shared.write(index * size, used, lane, |floats, lane| {
                    let mut partial = self.partial(floats);
                    self.tile_segment(tile, kv_head, keys, &mut partial, lane);
                });
            }
        });
        team.for_each(items, heads * self.value.size * segments, |item, lane| {
            let (tile, kv_head) = (tiles[item / self.kv_heads], item % self.kv_heads);
            let used = tile.rows * self.group * self.head_floats();
            lane.with_split([used], |[total], lane| {
                let mut total = self.partial(total);
                self.begin(kv_head, &mut total);
                for segment in 0..segments {
                    if segments_of(&self.span(tile)).nth(segment).is_none() {
                        break;
                    }
                    // SAFETY: an item has floats of its own.
                    unsafe {
                        shared.write((item * segments + segment) * size, used, lane, |floats, _| {
                            self.merge(&mut total, &mut self.partial(floats));
                        });
                    }
                }
                self.finish(tile, kv_head, &total, lane);
            });
        });
    }

    /// All query heads of one KV head, for the rows of a tile and all keys they see.
    fn tile(&self, tile: QueryTile, kv_head: usize, lane: &mut Lane) {
        let floats = tile.rows * self.group * self.head_floats();
        let mut total = lane.take_row(2 * floats);
        let (all, one) = total.split_at_mut(floats);
        let (mut all, mut one) = (self.partial(all), self.partial(&mut one[..floats]));
        self.begin(kv_head, &mut all);
        for keys in segments_of(&self.span(tile)) {
            self.tile_segment(tile, kv_head, keys, &mut one, lane);
            self.merge(&mut all, &mut one);
        }
        self.finish(tile, kv_head, &all, lane);
        lane.put_row(total);
    }

    /// The keys a query at `position` may see, before the mask of explicit bits.
    pub(super) fn visible(&self, position: i64, keys: usize) -> Range<usize> {
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

    /// The keys that any row of a tile may see.
    fn span(&self, tile: QueryTile) -> Range<usize> {
        let Some(sequence) = self.source.sequence(tile.sequence) else { return 0..0 };
        let range = |row: usize| self.visible(sequence.position(tile, row), sequence.keys);
        // Visible ranges grow and shrink with the position, so first and last row span them all.
        let (first, last) = (range(0), range(tile.rows - 1));
        first.start.min(last.start)..first.end.max(last.end)
    }

    /// The elements of a weighted sum of values, a whole number of vectors.
    pub(super) fn sum_floats(&self) -> usize {
        self.value.size.next_multiple_of(WIDTH)
    }

    /// The floats of a head in a [`Partial`].
    fn head_floats(&self) -> usize {
        self.sum_floats() + State::FLOATS
    }

    /// A place for partial results in `floats`, [`Self::head_floats`] for each head.
    fn partial<'f>(&self, floats: &'f mut [f32]) -> Partial<'f> {
        let heads = floats.len() / self.head_floats();
        let (states, sums) = floats.split_at_mut(heads * State::FLOATS);
        Partial { states, sums }
    }

    /// Starts with the sinks of the heads alone.
    fn begin(&self, kv_head: usize, partial: &mut Partial<'_>) {
        partial.sums.fill(0.0);
        for index in 0..partial.states.len() / State::FLOATS {
            let sink = self.sinks.map(|sinks| sinks[kv_head * self.group + index % self.group]);
            State::new(sink).store(partial.states, index);
        }
    }

    /// Adds a segment's results to those of the segments before it.
    fn merge(&self, total: &mut Partial<'_>, segment: &mut Partial<'_>) {
        let size = self.sum_floats();
        for index in 0..total.states.len() / State::FLOATS {
            let mut state = State::load(total.states, index);
            let range = index * size..(index + 1) * size;
            let other = State::load(segment.states, index);
            state.merge(other, &mut total.sums[range.clone()], &mut segment.sums[range]);
            state.store(total.states, index);
        }
    }

    /// Divides by the sums of weights and writes the results of a tile.
    fn finish(&self, tile: QueryTile, kv_head: usize, partial: &Partial<'_>, lane: &mut Lane) {
        for row in 0..tile.rows {
            self.finish_row(tile.first_row + row, kv_head, row * self.group, partial, lane);
        }
    }

    /// Writes the results of a row, whose first head is `first` of the tile.
    fn finish_row(&self, row: usize, kv_head: usize, first: usize, partial: &Partial<'_>, lane: &mut Lane) {
        let (group, size) = (self.group, self.value.size);
        let sum_size = self.sum_floats();
        if size > 0 {
            let start = self.y.row_start(row) + kv_head * group * size;
            // SAFETY: every row is in one tile, and every tile meets each KV head once, so this range of this row is
            // written here only.
            unsafe {
                self.y.data.write(start, group * size, lane, |out, _| {
                    for (head, out) in out.chunks_exact_mut(size).enumerate() {
                        let state = State::load(partial.states, first + head);
                        let sums = &partial.sums[(first + head) * sum_size..][..size];
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
                        *out = State::load(partial.states, first + head).log_sum_exp();
                    }
                });
            }
        }
    }
}

/// The segments that keys are cut into. They begin at multiples of [`SEGMENT`], so that they do not depend on the tile.
fn segments_of(span: &Range<usize>) -> impl ExactSizeIterator<Item = Range<usize>> {
    let numbers = if span.is_empty() { 0..0 } else { span.start / SEGMENT..span.end.div_ceil(SEGMENT) };
    let span = span.clone();
    numbers.map(move |number| (number * SEGMENT).max(span.start)..((number + 1) * SEGMENT).min(span.end))
}
