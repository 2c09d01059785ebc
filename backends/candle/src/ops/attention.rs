//! Attention, over the paged KV cache and without a cache.
//!
//! Each query row is computed separately: the keys it attends to are gathered from its sequence, then [`Formula::attend`]
//! computes the formula.

use crate::{
    kernels::Kernel,
    tensor::{CPU, Result, floats, from_bytes, optional_vector, rows, store_rows},
};
use candle_core::{D, DType, Tensor};
use dsrun_core::{
    DType as StoredType,
    cache_row::{CACHE_GROUP, cache_head_size},
    op::{Attention, AttentionMask, AttentionPrepare, PagedAttention},
};
use dsrun_host::Frame;

impl Kernel for AttentionPrepare {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        // The reference needs no work list; a bound one is filled with zeros.
        frame.output::<i32>(0)?.data.fill(0);
        Ok(())
    }
}

/// A sequence of the step.
struct Sequence {
    /// The first query row.
    first_row: usize,
    /// Query rows.
    queries: usize,
    /// The position of the first query; negative if there are fewer keys than queries.
    first_position: i64,
    /// The positions of its keys, `n` of them.
    positions: Vec<i64>,
    /// The keys `[kv_heads, n, D]`.
    keys: Tensor,
    /// The values `[kv_heads, n, D']`.
    values: Tensor,
}

/// The attributes of both ops.
struct Formula {
    kv_heads: usize,
    /// Query heads of a KV head.
    group: usize,
    scale: f64,
    softcap: f64,
    window: i64,
    mask: AttentionMask,
    /// Whether distances count in both directions, as without a cache.
    both_ways: bool,
    /// ALiBi slopes `[kv_heads, group, 1]`.
    slopes: Option<Tensor>,
    /// Sinks `[kv_heads, group, 1]`.
    sinks: Option<Tensor>,
}

impl Formula {
    /// A vector over query heads as `[kv_heads, group, 1]`.
    fn by_head(&self, vector: Option<Tensor>) -> Result<Option<Tensor>> {
        let shape = (self.kv_heads, self.group, 1);
        Ok(vector.map(|vector| vector.reshape(shape)).transpose()?)
    }

    /// Whether the query at `position` sees the key at `key`. `bit` returns the explicit mask's bit for a token of this step.
    fn sees(&self, position: i64, key: i64, first_position: i64, bit: impl Fn(usize) -> bool) -> bool {
        let masked = match self.mask {
            AttentionMask::Causal => key <= position,
            AttentionMask::Bidirectional => true,
            AttentionMask::Explicit => usize::try_from(key - first_position).map_or(true, bit),
        };
        let near = key > position - self.window && (!self.both_ways || key < position + self.window);
        masked && (self.window == 0 || near)
    }

    /// Attention of one query `[kv_heads, group, D]`: the result `[kv_heads, group, D']` and the logarithm of the sum of the
    /// exponentials of scores `[kv_heads, group, 1]`.
    fn attend(
        &self,
        query: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        distances: Tensor,
    ) -> Result<(Tensor, Tensor)> {
        // score_i = softcap(scale * q . k_i) - alibi[h] * (p - i), softcap(x) = c * tanh(x / c)
        let mut scores = (query.matmul(&keys.t()?)? * self.scale)?;
        if self.softcap > 0.0 {
            scores = ((scores / self.softcap)?.tanh()? * self.softcap)?;
        }
        if let Some(slopes) = &self.slopes {
            scores = scores.broadcast_sub(&slopes.broadcast_mul(&distances)?)?;
        }
        // w = softmax(score); a sink is one more score with no value
        let mut largest = scores.max_keepdim(D::Minus1)?;
        if let Some(sinks) = &self.sinks {
            largest = largest.maximum(sinks)?;
        }
        let weights = scores.broadcast_sub(&largest)?.exp()?;
        let mut sum = weights.sum_keepdim(D::Minus1)?;
        if let Some(sinks) = &self.sinks {
            sum = (sum + (sinks - &largest)?.exp()?)?;
        }
        // y = sum_i w_i v_i
        let y = weights.matmul(values)?.broadcast_div(&sum)?;
        Ok((y, (largest + sum.log()?)?))
    }

    /// Runs all rows of a step, and stores result 0 and, where the op has it, result 1. A row that two sequences claim belongs to the
    /// first.
    fn run(
        &self,
        frame: &Frame<'_>,
        rows: usize,
        sequences: impl Iterator<Item = Result<Sequence>>,
        bit: impl Fn(usize, usize) -> bool,
        with_log_sum_exp: bool,
    ) -> Result<()> {
        let query = floats(frame, 0, rows)?;
        let size = query.dim(1)? / (self.kv_heads * self.group);
        let (mut done, mut results) = (vec![false; rows], (Vec::new(), Vec::new(), Vec::new()));
        for sequence in sequences {
            let sequence = sequence?;
            for index in 0..sequence.queries.min(rows.saturating_sub(sequence.first_row)) {
                let row = sequence.first_row + index;
                if std::mem::replace(&mut done[row], true) {
                    continue;
                }
                let position = sequence.first_position + index as i64;
                let first = sequence.first_position;
                let sees = |key: i64| self.sees(position, key, first, |token| bit(row, token));
                let seen: Vec<u32> = (0u32..)
                    .zip(&sequence.positions)
                    .filter_map(|(index, key)| sees(*key).then_some(index))
                    .collect();
                let query = query.get(row)?.reshape((self.kv_heads, self.group, size))?;
                let (y, log_sum_exp) = self.row(&query, &sequence, position, seen)?;
                results.0.push(row);
                results.1.push(y.flatten_all()?);
                results.2.push(log_sum_exp.flatten_all()?);
            }
        }
        let (rows, y, log_sum_exp) = results;
        if rows.is_empty() {
            return Ok(());
        }
        store_rows(frame, 0, &rows, &Tensor::stack(&y, 0)?)?;
        if with_log_sum_exp {
            store_rows(frame, 1, &rows, &Tensor::stack(&log_sum_exp, 0)?)?;
        }
        Ok(())
    }

    /// Attention of a query over the keys at `seen` of its sequence. Seeing nothing gives zeros and minus infinity.
    fn row(
        &self,
        query: &Tensor,
        sequence: &Sequence,
        position: i64,
        seen: Vec<u32>,
    ) -> Result<(Tensor, Tensor)> {
        if seen.is_empty() {
            let shape = (self.kv_heads, self.group, sequence.values.dim(2)?);
            let nothing = Tensor::full(f32::NEG_INFINITY, (self.kv_heads, self.group, 1), CPU)?;
            return Ok((Tensor::zeros(shape, DType::F32, CPU)?, nothing));
        }
        let distance = |index: &u32| {
            let distance = position - sequence.positions[*index as usize];
            (if self.both_ways { distance.abs() } else { distance }) as f32
        };
        let distances = Tensor::from_iter(seen.iter().map(distance), CPU)?;
        let seen = Tensor::new(seen, CPU)?;
        let (keys, values) = (sequence.keys.index_select(&seen, 1)?, sequence.values.index_select(&seen, 1)?);
        self.attend(query, &keys, &values, distances)
    }
}

impl Kernel for PagedAttention {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let [starts, queries, lengths, tables] = [3, 4, 5, 6].map(|index| frame.input::<i32>(index));
        let (starts, queries, lengths, tables) = (starts?, queries?, lengths?, tables?);
        let bits = frame.has(10).then(|| frame.input::<u32>(10)).transpose()?;
        let pages = rows(frame, if frame.has(2) { &[1, 2] } else { &[1] }, &[]);
        let block = frame.bytes(1)?.shape[2];
        let mut formula = Formula {
            kv_heads: self.kv_heads as usize,
            group: (self.query_heads / self.kv_heads) as usize,
            scale: f64::from(self.scale),
            softcap: f64::from(self.softcap),
            window: i64::from(self.window),
            mask: self.mask,
            both_ways: false,
            slopes: None,
            sinks: None,
        };
        formula.slopes = formula.by_head(optional_vector(frame, 8)?)?;
        formula.sinks = formula.by_head(optional_vector(frame, 9)?)?;

        let sequence = |index: usize| -> Option<Result<Sequence>> {
            let first_row = usize::try_from(starts.at(index)).ok()?;
            let queries = usize::try_from(queries.at(index)).ok().filter(|queries| *queries > 0)?;
            let length = usize::try_from(lengths.at(index)).unwrap_or(0);
            // Key i is slot i % B of page block_table[s, i / B]; a key without a page is skipped.
            let table = tables.row(index);
            let page = |key: usize| usize::try_from(table[key / block]).ok().filter(|page| *page < pages);
            let places: Vec<(i64, [usize; 2])> = (0..length.min(table.len().saturating_mul(block)))
                .filter_map(|key| Some((key as i64, [page(key)?, key % block])))
                .collect();
            let read = || {
                let slots: Vec<[usize; 2]> = places.iter().map(|(_, slot)| *slot).collect();
                let keys = cached(frame, 1, &slots)?;
                let values = match frame.has(2) {
                    true => cached(frame, 2, &slots)?,
                    // The value of a key is its first elements.
                    false => keys.narrow(2, 0, self.value_size as usize)?.contiguous()?,
                };
                let positions = places.iter().map(|(key, _)| *key).collect();
                let first_position = i64::from(lengths.at(index)) - queries as i64;
                Ok(Sequence { first_row, queries, first_position, positions, keys, values })
            };
            Some(read())
        };
        let count = rows(frame, &[3, 4, 5, 6], &[]);
        let rows = rows(frame, if bits.is_some() { &[0, 10] } else { &[0] }, &[0, 1]);
        let bit = |row: usize, token: usize| {
            let word = bits.as_ref().and_then(|bits| bits.row(row).get(token / 32).copied());
            word.is_some_and(|word| word >> (token % 32) & 1 == 1)
        };
        formula.run(frame, rows, (0..count).filter_map(sequence), bit, true)
    }
}

/// The keys or values `[kv_heads, n, D]` in these slots of a cache, each given by its page and its place in the page.
fn cached(frame: &Frame<'_>, index: usize, slots: &[[usize; 2]]) -> Result<Tensor> {
    let cache = frame.bytes(index)?;
    let (heads, size) = (cache.shape[1], cache.shape[3]);
    let mut bytes = Vec::new();
    for head in 0..heads {
        for [page, slot] in slots {
            let start = page * cache.strides[0] + head * cache.strides[1] + slot * cache.strides[2];
            bytes.extend_from_slice(cache.data.range(start, size));
        }
    }
    let head = cache_head_size(frame.operand_dtype(index)?, size).unwrap_or(size);
    if frame.operand_dtype(index)? == StoredType::I8 {
        // Integers, and behind them the scale of each group.
        let mut elements = Vec::new();
        for row in bytes.chunks_exact(size.max(1)) {
            let (integers, scales) = row.split_at(head);
            let scales = scales.as_chunks().0.iter().map(|scale| f32::from_le_bytes(*scale));
            for (group, scale) in integers.chunks(CACHE_GROUP).zip(scales) {
                elements.extend(group.iter().map(|integer| f32::from(*integer as i8) * scale));
            }
        }
        return Ok(Tensor::from_vec(elements, (heads, slots.len(), head), CPU)?);
    }
    let stored = from_bytes(&bytes, frame.operand_dtype(index)?, &[heads, slots.len(), size])?;
    Ok(stored.to_dtype(DType::F32)?)
}

impl Kernel for Attention {
    fn run(&self, frame: &Frame<'_>) -> Result<()> {
        let (starts, lengths) = (frame.input::<i32>(3)?, frame.input::<i32>(4)?);
        let both_ways = self.mask == AttentionMask::Bidirectional;
        let mut formula = Formula {
            kv_heads: self.kv_heads as usize,
            group: (self.query_heads / self.kv_heads) as usize,
            scale: f64::from(self.scale),
            softcap: f64::from(self.softcap),
            window: i64::from(self.window),
            mask: self.mask,
            both_ways,
            slopes: None,
            sinks: None,
        };
        formula.slopes = formula.by_head(optional_vector(frame, 5)?)?;

        let available = rows(frame, &[1, 2], &[]);
        let (keys, values) = (floats(frame, 1, available)?, floats(frame, 2, available)?);
        let sequence = |index: usize| -> Option<Result<Sequence>> {
            let first_row = usize::try_from(starts.at(index)).ok()?;
            let queries = usize::try_from(lengths.at(index)).ok().filter(|queries| *queries > 0)?;
            let count = queries.min(available.saturating_sub(first_row));
            // Rows of this sequence, [n, kv_heads * D], as [kv_heads, n, D].
            let by_head = |rows: &Tensor| -> Result<Tensor> {
                let rows = rows.narrow(0, first_row.min(available), count)?;
                let size = rows.dim(1)? / formula.kv_heads;
                Ok(rows.reshape((count, formula.kv_heads, size))?.transpose(0, 1)?.contiguous()?)
            };
            let read = || {
                let positions = (0..count as i64).collect();
                let (keys, values) = (by_head(&keys)?, by_head(&values)?);
                Ok(Sequence { first_row, queries, first_position: 0, positions, keys, values })
            };
            Some(read())
        };
        let sequences = (0..rows(frame, &[3, 4], &[])).filter_map(sequence);
        formula.run(frame, rows(frame, &[0], &[0]), sequences, |_, _| true, false)
    }
}
