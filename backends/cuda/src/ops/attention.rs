//! Attention, paged and not. Both run one kernel.

use super::{KernelSpec, Recipe, operand, result, type_name};
use crate::launch::{Bound, MAX_GRID, Parameters, Step};
use dsrun_core::{
    DType, Error, Result, TensorDesc,
    kernels::CallDesc,
    op::{Attention, AttentionMask, PagedAttention},
};

/// The most rows (queries times query heads) of a tile: they live in registers.
const MAX_ROWS: usize = 8;
/// The largest head: its accumulators live in registers and shared memory.
const MAX_HEAD: usize = 256;
/// The most splits of a sequence's keys.
const MAX_SPLITS: usize = 32;
/// Threads of a block.
const THREADS: usize = 128;

/// How the kernel is cut to a call.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Query heads in a tile.
    heads: usize,
    /// Queries in a tile.
    tokens: usize,
    /// Query heads of a KV head.
    group: usize,
    kv_heads: usize,
    /// Tiles there may be.
    tiles: usize,
    splits: usize,
    value_size: usize,
}

impl Cut {
    fn new(query_heads: u32, kv_heads: u32, tokens: usize, sequences: usize, value_size: usize) -> Self {
        let group = (query_heads / kv_heads.max(1)).max(1) as usize;
        let heads = (1..=MAX_ROWS.min(group)).rev().find(|heads| group.is_multiple_of(*heads)).unwrap_or(1);
        // One token for each sequence: tiles of more would be empty.
        let in_tile = if tokens <= sequences { 1 } else { (MAX_ROWS / heads).max(1) };
        let tiles = tokens.min((tokens / in_tile).saturating_add(sequences));
        Self { heads, tokens: in_tile, group, kv_heads: kv_heads as usize, tiles, splits: 1, value_size }
    }

    fn parts(&self) -> usize {
        self.group / self.heads
    }

    /// Blocks of one split.
    fn blocks(&self) -> usize {
        self.tiles.saturating_mul(self.kv_heads * self.parts())
    }

    /// Bytes of what splits leave for the last.
    fn partial_bytes(&self) -> usize {
        if self.splits == 1 {
            return 0;
        }
        self.blocks() * self.splits * self.heads * self.tokens * (self.value_size + 2) * 4
    }
}

/// Lanes that share a key: enough for 8 elements each, a power of two.
fn lanes(size: usize) -> usize {
    size.div_ceil(8).next_power_of_two().clamp(4, 32)
}

fn vectors(tensor: &TensorDesc, size: usize) -> bool {
    let unit = 16 / tensor.dtype.bytes();
    let (_, outer) = tensor.strides.split_last().unwrap_or((&1, &[]));
    size.is_multiple_of(8) && outer.iter().all(|stride| stride.is_multiple_of(unit))
}

struct Kinds {
    query: DType,
    cache: DType,
    key_size: usize,
    value_size: usize,
    mask: AttentionMask,
    paged: bool,
    query_vectors: bool,
    cache_vectors: bool,
    softcap: bool,
    window: bool,
    alibi: bool,
}

fn spec(kinds: &Kinds, cut: &Cut) -> Result<KernelSpec> {
    let (key_size, value_size) = (kinds.key_size, kinds.value_size);
    if !(1..=MAX_HEAD).contains(&key_size) || !(1..=MAX_HEAD).contains(&value_size) {
        let message =
            format!("heads of {key_size} and {value_size} elements; CUDA has kernels for 1 to {MAX_HEAD}");
        return Err(Error::unsupported(message));
    }
    let mask = match kinds.mask {
        AttentionMask::Causal => 1,
        AttentionMask::Bidirectional => 2,
        AttentionMask::Explicit => 3,
    };
    let defines: [(_, &dyn std::fmt::Display); 14] = [
        ("Q", &type_name(kinds.query)?),
        ("K", &type_name(kinds.cache)?),
        ("KEY_SIZE", &key_size),
        ("VALUE_SIZE", &value_size),
        ("LANES", &lanes(key_size.max(value_size))),
        ("HEADS", &cut.heads),
        ("TOKENS", &cut.tokens),
        ("MASK", &mask),
        ("PAGED", &i32::from(kinds.paged)),
        ("SOFTCAP", &i32::from(kinds.softcap)),
        ("WINDOW", &i32::from(kinds.window)),
        ("ALIBI", &i32::from(kinds.alibi)),
        ("QUERY_VECTORS", &(if kinds.query_vectors { "true" } else { "false" })),
        ("CACHE_VECTORS", &(if kinds.cache_vectors { "true" } else { "false" })),
    ];
    Ok(KernelSpec::new("attention/attention.cu", "attention", defines))
}

/// The grid: tiles, KV heads and parts of their groups, splits.
fn grid(cut: &Cut) -> [usize; 3] {
    [cut.tiles, (cut.kv_heads * cut.parts()).min(MAX_GRID), cut.splits]
}

pub(super) fn paged(op: &PagedAttention, call: &CallDesc, machine: &super::Machine) -> Result<Recipe> {
    let (query, keys, values) = (operand(call, 0)?, operand(call, 1)?, operand(call, 2)?);
    let (tokens, sequences) = (query.shape[0], operand(call, 3)?.shape[0]);
    let (key_size, value_size) = (keys.shape[3], values.shape[3]);
    let mut cut = Cut::new(op.query_heads, op.kv_heads, tokens, sequences, value_size);
    // Four blocks of 128 threads for every multiprocessor keep enough loads under way.
    cut.splits = (machine.processors * 4).div_ceil(cut.blocks().max(1)).clamp(1, MAX_SPLITS);
    let kinds = Kinds {
        query: query.dtype,
        cache: keys.dtype,
        key_size,
        value_size,
        mask: op.mask,
        paged: true,
        query_vectors: vectors(query, key_size),
        cache_vectors: vectors(keys, key_size) && vectors(values, value_size),
        softcap: op.softcap > 0.0,
        window: op.window > 0,
        alibi: call.tensor(8).is_some(),
    };
    result(call, 1)?;
    let (spec, op) = (spec(&kinds, &cut)?, *op);
    let mut recipe = Recipe::of_one(spec, move |frame, function| {
        let (query, keys, values) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let (start, length, total) = (frame.tensor(3)?, frame.tensor(4)?, frame.tensor(5)?);
        let (table, y, log) = (frame.tensor(6)?, frame.result(0)?, frame.result(1)?);
        let bits = frame.optional(10);
        let mut rows = vec![query, y, log];
        rows.extend(bits);
        let [key_page, key_head, key_slot] = super::cache::strides(keys);
        let [value_page, value_head, value_slot] = super::cache::strides(values);
        let optional = |tensor: Option<&Bound>, dimension: usize| {
            tensor.map_or([0; 3], |tensor| {
                [tensor.address, tensor.stride(0) as u64, tensor.size(dimension) as u64]
            })
        };
        let [bits, bits_row, bits_columns] = optional(bits, 1);
        let parameters = Parameters::default()
            .extent(start.size(0), &[start, length, total, table])
            .extent(tokens, &rows)
            .float(op.scale)
            .float(op.softcap)
            .words([
                query.address,
                query.stride(0) as u64,
                keys.address,
                key_page,
                key_head,
                key_slot,
                values.address,
                value_page,
                value_head,
                value_slot,
                start.address,
                length.address,
                total.address,
                table.address,
                table.stride(0) as u64,
                table.size(1) as u64,
                keys.size(0) as u64,
                keys.size(2) as u64,
                frame.address(8),
                frame.address(9),
                bits,
                bits_row,
                bits_columns,
                cut.group as u64,
                cut.parts() as u64,
                u64::from(op.window),
                y.address,
                y.stride(0) as u64,
                log.address,
                log.stride(0) as u64,
                cut.splits as u64,
                frame.workspace,
                frame.persistent,
            ]);
        Ok(Step::kernel(function, grid(&cut), THREADS, parameters))
    });
    recipe.workspace = cut.partial_bytes();
    recipe.persistent = if cut.splits > 1 { cut.blocks() * 4 } else { 0 };
    Ok(recipe)
}

pub(super) fn unpaged(op: &Attention, call: &CallDesc) -> Result<Recipe> {
    let (query, key, value) = (operand(call, 0)?, operand(call, 1)?, operand(call, 2)?);
    let (tokens, sequences) = (query.shape[0], operand(call, 3)?.shape[0]);
    let heads = (op.kv_heads as usize).max(1);
    let (key_size, value_size) = (key.shape[1] / heads, value.shape[1] / heads);
    let mut cut = Cut::new(op.query_heads, op.kv_heads, tokens, sequences, value_size);
    cut.splits = 1;
    let kinds = Kinds {
        query: query.dtype,
        cache: key.dtype,
        key_size,
        value_size,
        mask: op.mask,
        paged: false,
        query_vectors: vectors(query, key_size),
        cache_vectors: vectors(key, key_size) && vectors(value, value_size),
        softcap: op.softcap > 0.0,
        window: op.window > 0,
        alibi: call.tensor(5).is_some(),
    };
    let (spec, op) = (spec(&kinds, &cut)?, *op);
    Ok(Recipe::of_one(spec, move |frame, function| {
        let (query, key, value) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let (start, length, y) = (frame.tensor(3)?, frame.tensor(4)?, frame.result(0)?);
        let parameters = Parameters::default()
            .extent(start.size(0), &[start, length])
            .extent(tokens, &[query, key, value, y])
            .float(op.scale)
            .float(op.softcap)
            .words([
                query.address,
                query.stride(0) as u64,
                key.address,
                0,
                key_size as u64,
                key.stride(0) as u64,
                value.address,
                0,
                value_size as u64,
                value.stride(0) as u64,
                start.address,
                length.address,
                length.address,
                0,
                0,
                0,
                0,
                1,
                frame.address(5),
                0,
                0,
                0,
                0,
                cut.group as u64,
                cut.parts() as u64,
                u64::from(op.window),
                y.address,
                y.stride(0) as u64,
                0,
                0,
                1,
                0,
                0,
            ]);
        Ok(Step::kernel(function, grid(&cut), THREADS, parameters))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::decoding(32, 8, 1, 1, (4, 1, 1))]
    #[case::prompt(32, 8, 512, 1, (4, 2, 257))]
    #[case::one_head_each(12, 12, 64, 2, (1, 8, 10))]
    #[case::large_group(71, 1, 3, 3, (1, 1, 3))]
    #[case::group_of_sixteen(32, 2, 1, 1, (8, 1, 1))]
    fn tiles_fit(
        #[case] query_heads: u32,
        #[case] kv_heads: u32,
        #[case] tokens: usize,
        #[case] sequences: usize,
        #[case] expected: (usize, usize, usize),
    ) {
        let cut = Cut::new(query_heads, kv_heads, tokens, sequences, 64);
        assert_eq!((cut.heads, cut.tokens, cut.tiles), expected);
        assert!(cut.heads * cut.tokens <= MAX_ROWS && cut.group.is_multiple_of(cut.heads));
    }

    #[rstest]
    #[case(64, 8)]
    #[case(80, 16)]
    #[case(128, 16)]
    #[case(256, 32)]
    #[case(3, 4)]
    fn lanes_cover_a_head(#[case] size: usize, #[case] expected: usize) {
        assert_eq!(lanes(size), expected);
        assert!(expected * 8 >= size);
    }
}
