//! Attention over the paged KV cache and within sequences.

use super::{
    launch::{CallPlan, Launch, Value},
    linear,
};
use crate::driver::{
    adapter::{DeviceSpec, Matrices},
    shader::{EMULATED, MATRICES},
};
use dsrun_core::{
    DType, Error, Result, TensorDesc,
    kernels::CallDesc,
    op::{Attention, AttentionMask, PagedAttention},
};

const SOURCE: &str = include_str!("../../kernels/attention.wgsl");
const SCORES: &str = include_str!("../../kernels/scores.wgsl");
const TILES: &str = include_str!("../../kernels/tiles.wgsl");
const TILED: &str = include_str!("../../kernels/attention_tiled.wgsl");
const BY_MATRICES: &str = include_str!("../../kernels/attention_matrices.wgsl");

/// Threads of a workgroup, the maximum that every adapter supports: more keys in flight hide memory latency when there are few
/// rows.
const THREADS: usize = 256;
/// Words of workgroup memory besides those of a query head.
const SHARED_WORDS: usize = 8 * THREADS + 32;
/// Values that a thread loads before it knows their weights.
const EARLY: usize = 16;
/// Values that a thread loads at a time once it knows their weights.
const LATE: usize = 8;

/// Rows of a tile of the kernels for many rows of a sequence.
const TILE_ROWS: usize = 64;
/// Rows of a sequence from which on these kernels compute them.
const MANY_ROWS: usize = 16;
/// The largest size of values for these kernels, whose threads hold parts of the sums of four rows or more.
const LARGEST_TILE_VALUES: usize = 256;
/// Words of workgroup memory that both need for keys and rows, at most.
const TILE_WORDS: usize = 2 * TILE_ROWS + 2 * THREADS + 3 * TILE_ROWS + 20;

/// Bytes of workgroup memory of the kernel without matrices: elements of queries and keys, and the values of 16 keys.
fn tiled_bytes(value_quads: usize) -> usize {
    4 * (TILE_WORDS + 2 * 32 * 68 + 4 * 16 * value_quads)
}

/// Bytes of workgroup memory of the kernel with matrices: queries, 32 keys or values, weights, and scores.
fn matrices_bytes(key_quads: usize, value_quads: usize) -> usize {
    let [keys, values] = [key_quads + 2, value_quads + 2];
    4 * TILE_WORDS + 8 * (TILE_ROWS * keys + 32 * keys.max(values) + TILE_ROWS * 10) + 4 * 2560
}

/// What both ops have.
struct Attributes {
    heads: u32,
    kv_heads: u32,
    scale: f32,
    softcap: f32,
    window: u32,
    mask: AttentionMask,
    /// The sizes of keys and of values.
    sizes: [usize; 2],
    /// The operand that has the values.
    values: usize,
}

fn tensor(call: &CallDesc, index: usize) -> Result<&TensorDesc> {
    call.tensor(index).ok_or_else(|| Error::internal(format!("operand {index} is not a tensor")))
}

/// A dispatch with a workgroup for each head of each row of the query.
fn of_heads(call: &CallDesc, op: &Attributes, spec: &DeviceSpec) -> Result<Launch> {
    let ([key_size, value_size], shared_bytes) = (op.sizes, spec.limits.max_compute_workgroup_storage_size);
    let rows = tensor(call, 0)?.shape.first().copied().unwrap_or(0);
    let needed = 4 * (key_size.saturating_add(SHARED_WORDS));
    if needed > shared_bytes as usize {
        let message = format!(
            "heads of {key_size} elements need {needed} bytes of workgroup memory, the adapter has {shared_bytes}"
        );
        return Err(Error::unsupported(message).at("query").field("shape[1]"));
    }
    let constant = |size: usize| u32::try_from(size.max(1)).unwrap_or(u32::MAX);
    let mut launch =
        Launch::new(SOURCE, "attention").reducing(true).groups(rows.saturating_mul(op.heads as usize));
    launch.shader.constants.push(("THREADS", constant(THREADS)));
    launch.shader.constants.push(("KEY_SIZE", constant(key_size)));
    launch.shader.constants.push(("QUADS", constant(key_size.div_ceil(4))));
    let quads = value_size.div_ceil(4).max(1);
    let columns = quads.min(THREADS);
    let early = EARLY.min(columns);
    launch
        .shader
        .constants
        .extend([("COLUMNS", constant(columns)), ("ROUNDS", constant(quads.div_ceil(columns)))]);
    launch.shader.constants.extend([("EARLY", constant(early)), ("LATE", constant(LATE)), ("FOUR", 4)]);
    with_attributes(factors(launch, call, op)?, op)
}

/// A dispatch with a workgroup for each head of each tile of rows, if a kernel for many rows can compute the call.
fn of_tiles(call: &CallDesc, op: &Attributes, spec: &DeviceSpec) -> Result<Option<Launch>> {
    let [key_size, value_size] = op.sizes;
    let (query, keys, values) = (tensor(call, 0)?, tensor(call, 1)?, tensor(call, op.values)?);
    let rows_of = |tensor: &TensorDesc| tensor.shape.first().copied().unwrap_or(0);
    let (rows, sequences) = (rows_of(query), rows_of(tensor(call, 3)?));
    let (key_quads, quads) = (key_size / 4, value_size / 4);
    let limit = spec.limits.max_compute_workgroup_storage_size as usize;
    // A step of generation has a row for each sequence.
    let suits = rows >= MANY_ROWS
        && rows > sequences
        && op.mask != AttentionMask::Explicit
        && [(query, key_size), (keys, key_size), (values, value_size)]
            .iter()
            .all(|(tensor, size)| in_fours(tensor, *size))
        && value_size <= LARGEST_TILE_VALUES;
    let by_matrices = spec.matrices.is_some()
        && [query, keys, values].iter().all(|tensor| tensor.dtype == DType::F16)
        && key_size.is_multiple_of(16)
        && value_size.is_multiple_of(32)
        && matrices_bytes(key_quads, quads) <= limit;
    if !suits || (!by_matrices && tiled_bytes(quads) > limit) {
        return Ok(None);
    }
    let (source, entry, constants) = if by_matrices {
        let fragments = [("KEY_FRAGMENTS", key_size / 16), ("VALUE_FRAGMENTS", value_size / 32)];
        let others = [("KEY_QUADS", key_quads), ("WEIGHT_FRAGMENTS", 2)];
        (BY_MATRICES, "attention_matrices", [fragments, others].concat())
    } else {
        (TILED, "attention_tiled", vec![("VALUES", quads.div_ceil(16)), ("FOUR", 4)])
    };
    let tiles = rows.div_ceil(TILE_ROWS).saturating_mul(op.heads as usize);
    let mut launch = Launch::new(TILES, entry).groups(tiles);
    launch.shader.parts.push(source);
    let constants = constants.into_iter().chain([("QUADS", quads)]);
    launch.shader.constants.extend(constants.map(|(name, size)| (name, size as u32)));
    launch = launch.flag(MATRICES, by_matrices).flag(EMULATED, spec.matrices == Some(Matrices::Emulated));
    with_attributes(factors(launch, call, op)?, op).map(Some)
}

/// Adds the parameters and functions that all kernels have.
fn with_attributes(mut launch: Launch, op: &Attributes) -> Result<Launch> {
    launch.shader.parts.push(SCORES);
    let [key_size, value_size] = op.sizes;
    let launch = launch
        .param("heads", Value::U32(op.heads))
        .param("group", Value::U32(op.heads / op.kv_heads.max(1)))
        .size("key_size", key_size)?
        .size("value_size", value_size)?
        .param("scale", Value::F32(op.scale))
        .param("softcap", Value::F32(op.softcap))
        .param("window", Value::U32(op.window));
    Ok(launch
        .flag("CAUSAL", op.mask == AttentionMask::Causal)
        .flag("EXPLICIT", op.mask == AttentionMask::Explicit))
}

/// Whether rows of a tensor can be read four elements at a time: those of a head begin at multiples of four.
fn in_fours(tensor: &TensorDesc, size: usize) -> bool {
    let strides = tensor.strides.iter().rev().skip(1);
    size > 0 && size.is_multiple_of(4) && strides.into_iter().all(|stride| stride.is_multiple_of(4))
}

/// Adds the query and the keys, operands 0 and 1, and the values.
fn factors(launch: Launch, call: &CallDesc, op: &Attributes) -> Result<Launch> {
    let [key_size, value_size] = op.sizes;
    let vectors = in_fours(tensor(call, 0)?, key_size) && in_fours(tensor(call, 1)?, key_size);
    let value_vectors = in_fours(tensor(call, op.values)?, value_size);
    let launch = launch.flag("VECTORS", vectors).flag("VALUE_VECTORS", value_vectors);
    let launch = match vectors {
        true => launch.vectors("query", call, 0)?.vectors("key", call, 1)?,
        false => launch.operand("query", call, 0)?.operand("key", call, 1)?,
    };
    match value_vectors {
        true => launch.vectors("value", call, op.values),
        false => launch.operand("value", call, op.values),
    }
}

/// The dispatches of a call: one for sequences of many rows, if a kernel for those suits, and one for the others. `finish` adds what
/// only one of the ops has.
fn plan(
    call: &CallDesc,
    op: &Attributes,
    spec: &DeviceSpec,
    finish: impl Fn(Launch) -> Result<Launch>,
) -> Result<CallPlan> {
    let first_of = |index| -> Result<usize> { Ok(tensor(call, index)?.shape.first().copied().unwrap_or(0)) };
    let (rows, sequences) = (first_of(0)?, first_of(3)?);
    let mut plan = Vec::new();
    // All rows are of one sequence, if there is one, so that there are few only if the step has few.
    let many = if sequences == 1 { 1 } else { MANY_ROWS };
    let mut rest = u32::MAX as usize;
    if let Some(launch) = of_tiles(call, op, spec)? {
        plan.push(finish(launch.size("many", many)?)?);
        rest = many;
    }
    if rest > 1 {
        let launch = finish(of_heads(call, op, spec)?.size("many", rest)?)?;
        plan.push(if rows <= linear::FEW_ROWS { launch.fixed() } else { launch });
    }
    Ok(plan.into())
}

pub(super) fn paged_attention(op: &PagedAttention, call: &CallDesc, spec: &DeviceSpec) -> Result<CallPlan> {
    let (keys, tables) = (tensor(call, 1)?, tensor(call, 6)?);
    // Values that are the first elements of keys are read from the cache of keys.
    let shared = op.value_size > 0;
    let value_index = if shared { 1 } else { 2 };
    let values = tensor(call, value_index)?;
    let (&[_, _, block, key_size], &[_, _, _, value_size], &[_, blocks]) =
        (keys.shape.as_slice(), values.shape.as_slice(), tables.shape.as_slice())
    else {
        return Err(Error::internal("caches have four dimensions and a block table two"));
    };
    let attributes = Attributes {
        heads: op.query_heads,
        kv_heads: op.kv_heads,
        scale: op.scale,
        softcap: op.softcap,
        window: op.window,
        mask: op.mask,
        sizes: [key_size, if shared { op.value_size as usize } else { value_size }],
        values: value_index,
    };
    plan(call, &attributes, spec, |mut launch| {
        for (index, name) in [(3, "start"), (4, "queries"), (5, "lengths"), (6, "tables")] {
            launch = launch.operand(name, call, index)?;
        }
        for (index, name) in [(8, "alibi"), (9, "sinks"), (10, "mask")] {
            launch = launch.operand(name, call, index)?;
        }
        for (name, cache) in [("key", keys), ("value", values)] {
            if let &[_, head, slot, _] = cache.strides.as_slice() {
                launch = launch
                    .size(format!("{name}_head_stride"), head)?
                    .size(format!("{name}_slot_stride"), slot)?;
            }
        }
        let words = call.tensor(10).and_then(|mask| mask.shape.get(1).copied()).unwrap_or(0);
        launch = launch.size("block", block)?.size("blocks", blocks)?.size("mask_words", words)?;
        launch = launch.result("y", call, 0)?.result("log_sum_exp", call, 1)?;
        Ok(launch.flag("PAGED", true))
    })
}

pub(super) fn attention(op: &Attention, call: &CallDesc, spec: &DeviceSpec) -> Result<CallPlan> {
    let size = |index| -> Result<usize> {
        let width = tensor(call, index)?.shape.get(1).copied().unwrap_or(0);
        Ok(width / (op.kv_heads as usize).max(1))
    };
    let attributes = Attributes {
        heads: op.query_heads,
        kv_heads: op.kv_heads,
        scale: op.scale,
        softcap: op.softcap,
        window: op.window,
        mask: op.mask,
        sizes: [size(1)?, size(2)?],
        values: 2,
    };
    plan(call, &attributes, spec, |mut launch| {
        for (index, name) in ["start", "queries", "alibi"].into_iter().enumerate() {
            launch = launch.operand(name, call, 3 + index)?;
        }
        // The shaders are shared with `paged_attention`, which has sinks. This op has none, and no operand has this index.
        launch = launch.operand("sinks", call, usize::MAX)?.result("y", call, 0)?;
        // A window covers, and a slope counts, keys on both sides of a row.
        Ok(launch.flag("BOTH_SIDES", op.mask == AttentionMask::Bidirectional))
    })
}

#[cfg(test)]
mod tests;
