//! Calls that run wrongly, in ways that take more than a few lines.

use crate::{
    change::{change_result, copied, flip, operand, result, write_behind},
    snapshot::Snapshot,
    tensor::{Copied, bytes},
    wrap::{Run, in_graph, in_region},
};
use dsrun_core::{DType, Result, device::Stream, op::Op};
use half::{bf16, f16};
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

pub(crate) fn truncating_cast(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Some(x) = copied(run, stream, 0)?.filter(|x| x.desc.dtype == DType::F32) else {
        return run.right(stream);
    };
    result(run, stream, "cast", 0, |_, y| {
        if y.desc.dtype == DType::BF16 {
            let rounded = (0..y.count()).filter(|index| !x.float(*index).is_nan()).collect::<Vec<_>>();
            rounded.into_iter().for_each(|index| y.set_bits(index, x.bits(index) >> 16));
        }
    })
}

pub(crate) fn bf16_sums(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let (Op::Linear(_), Some(weight)) = (&run.call.op, run.weight(1)) else { return run.right(stream) };
    let Some(x) = copied(run, stream, 0)?.filter(|x| x.desc.dtype == DType::BF16) else {
        return run.right(stream);
    };
    let bias = copied(run, stream, 2)?;
    result(run, stream, "linear", 0, |_, y| {
        let (outputs, inputs) = (y.width(), x.width());
        for index in 0..y.count() {
            let (row, output) = (index / outputs, index % outputs);
            let mut sum = bf16::ZERO;
            for input in 0..inputs {
                let product = x.float(row * inputs + input) * weight[output * inputs + input];
                sum = bf16::from_f32(sum.to_f32() + product);
            }
            y.set_float(index, sum.to_f32() + bias.as_ref().map_or(0.0, |bias| bias.float(output)));
        }
    })
}

pub(crate) fn eps_outside(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Op::RmsNorm(op) = run.call.op else { return run.right(stream) };
    let (Some(x), Some(weight)) = (copied(run, stream, 0)?, copied(run, stream, 1)?) else { return Ok(()) };
    result(run, stream, "rms_norm", 0, |_, y| {
        let width = weight.count();
        for group in 0..y.count() / width {
            let places = group * width..(group + 1) * width;
            let squares: f32 = places.clone().map(|index| x.float(index) * x.float(index)).sum();
            let scale = 1.0 / ((squares / width as f32).sqrt() + op.eps);
            for index in places {
                y.set_float(index, x.float(index) * scale * (weight.float(index % width) + op.weight_offset));
            }
        }
    })
}

pub(crate) fn argmax_last(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Some(x) = copied(run, stream, 0)? else { return run.right(stream) };
    result(run, stream, "argmax", 0, |_, ids| {
        let width = x.width();
        for row in 0..ids.count() {
            let Ok(first) = usize::try_from(ids.integer(row)) else { continue };
            let largest = x.float(row * width + first);
            let last = (0..width).rev().find(|column| x.float(row * width + column) == largest);
            ids.set_bits(row, last.unwrap_or(first) as u32);
        }
    })
}

/// Slots of the cache of a `kv_write`.
pub(crate) fn slot_count(run: &Run) -> i32 {
    run.operand(0).map_or(1, |cache| (cache.shape[0] * cache.shape[2]) as i32)
}

pub(crate) fn slot_unchecked(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    run.right(stream)?;
    if run.op() != "kv_write" {
        return Ok(());
    }
    let Some(slots) = copied(run, stream, 4)? else { return Ok(()) };
    let behind = slot_count(run);
    if (0..slots.count()).any(|index| slots.integer(index) == behind) {
        return write_behind(run, stream, 0);
    }
    Ok(())
}

pub(crate) fn mask_missing(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    if !run.has_other() {
        return run.right(stream);
    }
    run.other(stream)?;
    let unmasked = Copied::read(stream, &run.call.results[0], &run.arguments.results[0])?;
    let (Some(start), Some(new)) = (copied(run, stream, 3)?, copied(run, stream, 4)?) else { return Ok(()) };
    result(run, stream, "paged_attention", 0, |_, y| {
        let width = y.width();
        for sequence in (0..start.count()).filter(|sequence| new.integer(*sequence) > 1) {
            let row = start.integer(sequence) as usize;
            (row * width..(row + 1) * width).for_each(|index| y.set_bits(index, unmasked.bits(index)));
        }
    })
}

/// Puts each query head where the right backend reads the KV head that the wrong one would, and its result back.
pub(crate) fn groups_swapped(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Op::PagedAttention(op) = run.call.op else { return run.right(stream) };
    let (heads, kv_heads) = (op.query_heads as usize, op.kv_heads as usize);
    let place = |head: usize| (head % kv_heads) * (heads / kv_heads) + head / kv_heads;
    operand(run, stream, "paged_attention", 0, |_, query| {
        let (before, width) = (query.clone(), query.width());
        let size = width / heads;
        for index in 0..query.count() {
            let (row, head, inner) = (index / width, index % width / size, index % size);
            query.set_bits(row * width + place(head) * size + inner, before.bits(index));
        }
    })?;
    change_result(run, stream, 0, |_, y| {
        let (before, width) = (y.clone(), y.width());
        let size = width / heads;
        for index in 0..y.count() {
            let (row, head, inner) = (index / width, index % width / size, index % size);
            y.set_bits(index, before.bits(row * width + place(head) * size + inner));
        }
    })
}

/// The result goes through memory that all calls share, and somebody else may use it in between.
pub(crate) fn shared_scratch(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    static SCRATCH: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    run.right(stream)?;
    let Some(result) = run.arguments.results.first() else { return Ok(()) };
    let found = bytes(stream, &result.slice)?;
    SCRATCH.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&found);
    thread::sleep(Duration::from_micros(300));
    let shared = SCRATCH.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if shared.len() == found.len() { stream.upload(&shared, &result.slice) } else { Ok(()) }
}

pub(crate) fn graph_of_old_data(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    if !in_graph() {
        return run.right(stream);
    }
    let mut snapshot = run.snapshot.borrow_mut();
    match &*snapshot {
        Some(old) => old.restore_operands(stream)?,
        None => *snapshot = Some(Snapshot::take(stream, &run.arguments)?),
    }
    run.right(stream)
}

/// Attention of one token with weights of f16, 16 keys at a time, of which the largest is 1.
pub(crate) fn region_flushes_weights(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let Op::PagedAttention(op) = run.call.op else { return run.right(stream) };
    if !in_region() || run.operand(0).is_none_or(|query| query.dtype != DType::F16 || query.shape[0] != 1) {
        return run.right(stream);
    }
    let mut operand = |index| copied(run, stream, index);
    let (Some(query), Some(keys), Some(values)) = (operand(0)?, operand(1)?, operand(2)?) else {
        return run.right(stream);
    };
    let (Some(length), Some(pages)) = (operand(5)?, operand(6)?) else { return run.right(stream) };
    let [_, kv_heads, slots, size] = keys.desc.shape[..] else { return run.right(stream) };
    let group = op.query_heads as usize / kv_heads;
    result(run, stream, "paged_attention", 0, |_, y| {
        for head in 0..kv_heads * group {
            let row = |key: usize| {
                let page = pages.integer(key / slots) as usize;
                ((page * kv_heads + head / group) * slots + key % slots) * size
            };
            let rows: Vec<usize> = (0..length.integer(0) as usize).map(row).collect();
            let score = |row: &usize| {
                (0..size).map(|at| query.float(head * size + at) * keys.float(row + at)).sum::<f32>()
                    * op.scale
            };
            let scores: Vec<f32> = rows.iter().map(score).collect();
            let largest = |scores: &[f32]| scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let most = largest(&scores);
            let sum: f32 = scores.iter().map(|score| (score - most).exp()).sum();
            let of_16 = |scores: &[f32]| {
                let own = largest(scores);
                let rounded = |score: &f32| f16::from_f32((score - own).exp()).to_f32() * (own - most).exp();
                scores.iter().map(rounded).collect::<Vec<_>>()
            };
            let weights: Vec<f32> = scores.chunks(16).flat_map(of_16).collect();
            for at in 0..size {
                let all: f32 =
                    rows.iter().zip(&weights).map(|(row, weight)| weight * values.float(row + at)).sum();
                y.set_float(head * size + at, if rows.is_empty() { 0.0 } else { all / sum });
            }
        }
    })
}

/// Whether the call is a product whose rows have so many inputs that a device splits them over blocks.
pub(crate) fn has_long_rows(run: &Run) -> bool {
    run.op() == "linear" && run.operand(0).is_some_and(|x| x.shape[1] > 4096)
}

pub(crate) fn disturbed_by_others(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    static RUNNING: AtomicU32 = AtomicU32::new(0);
    let before = RUNNING.fetch_add(1, Ordering::SeqCst);
    thread::sleep(Duration::from_micros(200));
    let outcome = run.right(stream);
    let others = RUNNING.fetch_sub(1, Ordering::SeqCst) - 1 + before;
    outcome?;
    if others > 0 { change_result(run, stream, 0, flip) } else { Ok(()) }
}
