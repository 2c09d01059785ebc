//! Runs of keys: scores, weights and weighted values of all rows of a tile.

use super::{
    KeySource, QueryTile, Sequence,
    problem::{Operand, Partial, Problem},
    softmax::State,
};
use crate::{
    lanes::WIDTH,
    packed::{
        rows::{FEW_HEADS, RowProduct},
        temporary::{
            Elements, NOWHERE, PanelProduct, Rows, SCALES, copied_floats, copy_rows, transpose_rows,
            transposed_floats,
        },
    },
    parallel::Lane,
};
use dsrun_core::cache_row::{CACHE_GROUP, CACHE_SCALE_BYTES};
use std::ops::Range;

/// The maximum number of keys of a run: their panels, and the scores of a tile, fit the L1 and L2 caches.
const RUN: usize = 64;

/// Memory for a run of keys.
struct RunScratch<'a> {
    /// Scores of every head, then weights.
    scores: &'a mut [f32],
    keys: &'a mut [f32],
    values: &'a mut [f32],
    /// The scales of keys and of values, if the cache is of i8.
    key_scales: &'a mut [[f32; SCALES]],
    value_scales: &'a mut [[f32; SCALES]],
}

/// Floats of the scales of a run.
fn scale_floats(operand: &Operand<'_>) -> usize {
    match operand.data {
        Elements::Bytes(_) => operand.size.div_ceil(CACHE_GROUP) * SCALES,
        Elements::Floats(_) => 0,
    }
}

/// Reads the scales at the ends of rows of an i8 cache; 0 for rows that are not there.
fn read_scales(operand: &Operand<'_>, starts: &[usize], scales: &mut [[f32; SCALES]]) {
    let Elements::Bytes(data) = operand.data else { return };
    let bytes = scales.len() * CACHE_SCALE_BYTES;
    for (index, start) in starts.iter().enumerate() {
        let end = start.wrapping_add(operand.size);
        match data.get(end..end.wrapping_add(bytes)) {
            Some(found) => {
                for (group, scale) in scales.iter_mut().zip(found.as_chunks::<CACHE_SCALE_BYTES>().0) {
                    // Mapping the bytes one by one would call a function for each.
                    group[index] = f32::from_le_bytes(bytemuck::cast(*scale));
                }
            }
            None => scales.iter_mut().for_each(|group| group[index] = 0.0),
        }
    }
}

/// Where the keys of a run and their values start; [`NOWHERE`] for keys that have no page.
struct Places {
    keys: [usize; RUN],
    values: [usize; RUN],
}

/// A block of keys that a tile processes together.
struct Run<'a> {
    keys: Range<usize>,
    places: &'a Places,
    /// The places of the keys of the next run.
    ahead: &'a Places,
}

/// The keys and values of a run.
enum Source<'a> {
    /// As they are in memory.
    Rows { keys: Rows<'a>, values: Rows<'a> },
    /// In panels.
    Panels { keys: &'a [f32], values: &'a [f32] },
}

/// Rows of a tile, and keys of a run that all of them see.
struct Part {
    rows: Range<usize>,
    keys: Range<usize>,
    /// Keys of the run.
    count: usize,
}

impl<S: KeySource> Problem<'_, S> {
    /// All query heads of one KV head, for the rows of a tile and a segment of keys.
    pub(super) fn tile_segment(
        &self,
        tile: QueryTile,
        kv_head: usize,
        keys: Range<usize>,
        out: &mut Partial<'_>,
        lane: &mut Lane,
    ) {
        let Some(sequence) = self.source.sequence(tile.sequence) else { return };
        let (group, size) = (self.group, self.key.size);
        let heads = tile.rows * group;
        let panels = [transposed_floats(RUN, size), copied_floats(RUN, self.value.size)];
        let scales = [scale_floats(&self.key), scale_floats(&self.value)];
        let sizes = [heads * size, heads * RUN, panels[0], panels[1], scales[0], scales[1]];
        out.sums.fill(0.0);
        (0..heads).for_each(|head| State::new(None).store(out.states, head));
        let [queries, scores, key_panels, value_panels, key_scales, value_scales] = lane.split(sizes);
        for row in 0..tile.rows {
            let start = self.query.row_start(tile.first_row + row) + kv_head * group * size;
            if size > 0 {
                self.query.data.widen(start, &mut queries[row * group * size..][..group * size]);
            }
        }
        let [key_scales, value_scales] = [key_scales, value_scales].map(|scales| scales.as_chunks_mut().0);
        let mut scratch =
            RunScratch { scores, keys: key_panels, values: value_panels, key_scales, value_scales };
        // Runs start where they would if the tile saw all keys.
        let first = keys.start - keys.start % RUN;
        let places = |start: usize| self.places(tile.sequence, kv_head, start..(start + RUN).min(keys.end));
        let mut next = places(first);
        for start in (first..keys.end).step_by(RUN) {
            let here = std::mem::replace(&mut next, places((start + RUN).min(keys.end)));
            let run = Run { keys: start..(start + RUN).min(keys.end), places: &here, ahead: &next };
            self.tile_run(&sequence, tile, kv_head, &run, queries, out, &mut scratch);
        }
    }

    /// The places of the keys of a run.
    fn places(&self, sequence: usize, kv_head: usize, run: Range<usize>) -> Places {
        let mut places = Places { keys: [NOWHERE; RUN], values: [NOWHERE; RUN] };
        let mut key = run.start;
        while key < run.end {
            let (length, place) = self.source.run(sequence, kv_head, key);
            let count = length.min(run.end - key).max(1);
            if let Some((first_key, first_value)) = place {
                for index in 0..count {
                    places.keys[key - run.start + index] = first_key + index * self.key.stride;
                    places.values[key - run.start + index] = first_value + index * self.value.stride;
                }
            }
            key += count;
        }
        places
    }

    /// As [`Self::tile_segment`], for one run of keys.
    #[expect(clippy::too_many_arguments, reason = "a run has as many coordinates")]
    fn tile_run(
        &self,
        sequence: &Sequence,
        tile: QueryTile,
        kv_head: usize,
        run: &Run<'_>,
        queries: &[f32],
        out: &mut Partial<'_>,
        scratch: &mut RunScratch<'_>,
    ) {
        let Run { keys: run, places, ahead } = run;
        let count = run.len();
        let all_there = !places.keys[..count].contains(&NOWHERE);
        read_scales(&self.key, &places.keys[..count], scratch.key_scales);
        read_scales(&self.value, &places.values[..count], scratch.value_scales);
        let keys = Rows {
            data: self.key.data,
            scales: scratch.key_scales,
            starts: &places.keys[..count],
            ahead: &ahead.keys,
            size: self.key.size,
        };
        let values = Rows {
            data: self.value.data,
            scales: scratch.value_scales,
            starts: &places.values[..count],
            ahead: &ahead.values,
            size: self.value.size,
        };
        let source = if tile.rows * self.group <= FEW_HEADS {
            Source::Rows { keys, values }
        } else {
            let key_panels = &mut scratch.keys[..transposed_floats(count, self.key.size)];
            let value_panels = &mut scratch.values[..copied_floats(count, self.value.size)];
            transpose_rows(self.instructions, &keys, key_panels);
            copy_rows(self.instructions, &values, value_panels);
            Source::Panels { keys: key_panels, values: value_panels }
        };

        let range = |row: usize| {
            let range = self.visible(sequence.position(tile, row), sequence.keys);
            range.start.max(run.start)..range.end.min(run.end)
        };
        let mut row = 0;
        while row < tile.rows {
            // Rows that attend to the same keys are processed together.
            let seen = range(row);
            let mut rows = 1;
            while self.bits.is_none() && row + rows < tile.rows && range(row + rows) == seen {
                rows += 1;
            }
            let is_seen = |key: usize| {
                places.keys[key - run.start] != NOWHERE
                    && self.has_bit(tile.first_row + row, key, sequence.first_position)
            };
            let mut part = |start: usize, end: usize| {
                let part = Part { rows: row..row + rows, keys: start - run.start..end - run.start, count };
                let ahead = sequence.position(tile, row) - start as i64;
                self.absorb(kv_head, &part, ahead, queries, &source, scratch.scores, out);
            };
            if all_there && self.bits.is_none() {
                if !seen.is_empty() {
                    part(seen.start, seen.end);
                }
            } else {
                for_each_run(seen.start, seen.end, is_seen, part);
            }
            row += rows;
        }
    }

    /// Adds keys that several rows see to their softmax. `ahead` is how far the first row is ahead of the first key.
    #[expect(clippy::too_many_arguments, reason = "a part has as many coordinates")]
    fn absorb(
        &self,
        kv_head: usize,
        part: &Part,
        ahead: i64,
        queries: &[f32],
        source: &Source<'_>,
        scores: &mut [f32],
        out: &mut Partial<'_>,
    ) {
        let (group, size, sum_size) = (self.group, self.key.size, self.sum_floats());
        let heads = part.rows.start * group..part.rows.end * group;
        let queries = &queries[heads.start * size..heads.end * size];
        let first = match source {
            Source::Rows { keys, .. } => {
                RowProduct {
                    rows: keys,
                    part: part.keys.clone(),
                    x: queries,
                    x_stride: size,
                    heads: heads.len(),
                    out: &mut *scores,
                    out_stride: RUN,
                }
                .dot(self.instructions);
                0
            }
            Source::Panels { keys, .. } => {
                // Whole panels; the scores of keys beside the part are not read.
                let panels = part.keys.start / WIDTH..part.keys.end.div_ceil(WIDTH);
                PanelProduct {
                    panels: &keys[panels.start * WIDTH * size..panels.end * WIDTH * size],
                    panel_count: panels.len(),
                    stride: size,
                    first: 0,
                    inputs: size,
                    x: queries,
                    x_stride: size,
                    rows: heads.len(),
                    out: &mut *scores,
                    out_stride: RUN,
                    add: false,
                }
                .run(self.instructions);
                part.keys.start - panels.start * WIDTH
            }
        };
        for (index, head) in heads.clone().enumerate() {
            let scores = &mut scores[index * RUN + first..][..part.keys.len()];
            let slope = self.alibi.map(|slopes| slopes[kv_head * group + head % group]);
            self.scores.adjust(slope, ahead + (index / group) as i64, scores);
            let mut state = State::load(out.states, head);
            state.absorb(scores, &mut out.sums[head * sum_size..][..sum_size]);
            state.store(out.states, head);
        }
        let (weights, count) = (&scores[first..], heads.len());
        let sums = &mut out.sums[heads.start * sum_size..heads.end * sum_size];
        match source {
            Source::Rows { values, .. } => RowProduct {
                rows: values,
                part: part.keys.clone(),
                x: weights,
                x_stride: RUN,
                heads: count,
                out: sums,
                out_stride: sum_size,
            }
            .add_weighted(self.instructions),
            Source::Panels { values, .. } => PanelProduct {
                panels: values,
                panel_count: sum_size / WIDTH,
                stride: part.count,
                first: part.keys.start,
                inputs: part.keys.len(),
                x: weights,
                x_stride: RUN,
                rows: count,
                out: sums,
                out_stride: sum_size,
                add: true,
            }
            .run(self.instructions),
        }
    }

    /// Whether explicit bits, if there are any, let a row see a key.
    fn has_bit(&self, row: usize, key: usize, step_start: i64) -> bool {
        let Some(bits) = &self.bits else { return true };
        let Ok(index) = usize::try_from(key as i64 - step_start) else { return true };
        bits.row(row).get(index / 32).is_some_and(|word| word >> (index % 32) & 1 == 1)
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
