//! Attention, over the paged KV cache and without a cache.
//!
//! A work item is one KV head of a tile of query rows of one sequence. It iterates over blocks of keys, called runs, whose keys
//! and values are widened and laid out in panels for all rows and query heads of the tile, and keeps for every query head a
//! running maximum, sum and weighted sum of values ([`softmax`]). Segments of many runs are computed independently and then
//! combined, so that several threads can split the keys of a tile (split-KV). The boundaries of runs and segments depend only
//! on the positions of keys, so a row's result depends neither on the other rows nor on the number of threads.

mod problem;
mod run;
mod softmax;

use crate::{
    floats::{FloatFrame, FloatOutput},
    kernel::Kernel,
    lanes::InstructionSet,
    packed::temporary::Elements,
    parallel::{QueryTile, Worker},
};
use dsrun_core::{
    DType, Error, Result,
    cache_row::cache_head_size,
    op::{Attention, AttentionMask, AttentionPrepare, PagedAttention},
};
use dsrun_host::{Frame, Tensor};
use problem::{Operand, Problem};
use softmax::Scores;

/// The number of query rows of a tile: enough that packing a run of keys costs little compared with multiplying by them.
const TILE_ROWS: usize = 32;

/// The owner of rows that belong to no sequence.
const NO_SEQUENCE: u32 = u32::MAX;

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

impl Sequence {
    /// The position of a row of a tile of this sequence.
    fn position(&self, tile: QueryTile, row: usize) -> i64 {
        self.first_position + (tile.first_row + row - self.first_row) as i64
    }
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
        // This backend needs no work list; a bound one is filled with zeros.
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

/// A cache, and the size of its heads.
fn cache<'f>(frame: &'f Frame<'_>, index: usize) -> Result<(Tensor<'f, Elements<'f>>, usize)> {
    let dtype = frame.operand_dtype(index)?;
    let cache = match dtype {
        DType::I8 => frame.input::<i8>(index)?.with(Elements::Bytes),
        _ => frame.floats(index)?.with(Elements::Floats),
    };
    let head_size = cache.shape.last().and_then(|row| cache_head_size(dtype, *row));
    Ok((cache, head_size.ok_or_else(|| Error::internal("a cache has no rows"))?))
}

impl Kernel for PagedAttention {
    fn run(&self, frame: &Frame<'_>, worker: &mut Worker<'_>) -> Result<()> {
        let (query, (keys, key_size)) = (frame.floats(0)?, cache(frame, 1)?);
        // Without a cache of their own, values are the first elements of their keys.
        let shared = !frame.has(2);
        let (values, value_size) = cache(frame, if shared { 1 } else { 2 })?;
        let &[_, _, block, _] = keys.shape else { return Ok(()) };
        let value_size = if shared { self.value_size as usize } else { value_size };
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
            instructions: InstructionSet::best(),
        };
        problem.run(worker.tiles, &mut worker.team, worker.partials);
        Ok(())
    }
}

/// Keys in the rows of the same step.
struct Unpaged<'a> {
    start: Tensor<'a, &'a [i32]>,
    length: Tensor<'a, &'a [i32]>,
    rows: usize,
    key_stride: usize,
    value_stride: usize,
    key_size: usize,
    value_size: usize,
}

impl KeySource for Unpaged<'_> {
    fn sequence(&self, index: usize) -> Option<Sequence> {
        let first_row = usize::try_from(self.start.at(index)).ok()?;
        let queries = usize::try_from(self.length.at(index)).ok()?;
        let keys = queries.min(self.rows.saturating_sub(first_row));
        Some(Sequence { first_row, queries, first_position: 0, keys })
    }

    fn run(&self, sequence: usize, head: usize, key: usize) -> (usize, Option<(usize, usize)>) {
        let Some(sequence) = self.sequence(sequence) else { return (usize::MAX, None) };
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
        let source = Unpaged {
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
            key: Operand { data: Elements::Floats(keys.data), stride: keys.strides[0], size: key_size },
            value: Operand {
                data: Elements::Floats(values.data),
                stride: values.strides[0],
                size: value_size,
            },
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
            instructions: InstructionSet::best(),
        };
        problem.run(worker.tiles, &mut worker.team, worker.partials);
        Ok(())
    }
}

/// Cuts the rows of all sequences into tiles. A row that two sequences contain belongs to the first, so no row is in two tiles.
fn make_tiles(
    owners: &mut Vec<u32>,
    tiles: &mut Vec<QueryTile>,
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
                tiles.push(QueryTile { first_row: first_row + start, rows, sequence: *owner as usize });
            }
        }
        first_row += run.len();
    }
}
