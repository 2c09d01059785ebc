//! Calls in which NaN gets where it must not, or does not get where it must.

use crate::{
    change::{change_result, copied, operand, result},
    tensor::Copied,
    wrap::Run,
};
use dsrun_core::{Result, device::Stream, op::Op};

/// Keys of a sequence that a query does not attend to, by the query's position and the window.
type Hidden = fn(key: i64, position: i64, window: i64) -> bool;

/// The keys behind the query.
pub(crate) fn later(key: i64, position: i64, _: i64) -> bool {
    key > position
}

/// The keys that have left the window.
pub(crate) fn left(key: i64, position: i64, window: i64) -> bool {
    window > 0 && key <= position - window
}

/// Multiplies hidden values by a weight of 0, or hidden keys before their scores are masked by an addition: what is not finite
/// there makes NaN.
pub(crate) fn hidden_multiplied(
    run: &Run,
    stream: &mut dyn Stream,
    of_values: bool,
    hidden: Hidden,
) -> Result<()> {
    run.right(stream)?;
    let Op::PagedAttention(op) = run.call.op else { return Ok(()) };
    let lengths = [3, 4, 5, 6].map(|index| copied(run, stream, index));
    let [Some(start), Some(new), Some(total), Some(table)] = lengths.map(|read| read.ok().flatten()) else {
        return Ok(());
    };
    let Some(cache) = copied(run, stream, if of_values { 2 } else { 1 })? else { return Ok(()) };
    let [pages, kv_heads, block, size] = [0, 1, 2, 3].map(|dimension| cache.desc.shape[dimension]);
    let group = op.query_heads as usize / kv_heads;
    let mut spoilt = Vec::new();
    for sequence in 0..start.count() {
        let [first, count, keys] = [&start, &new, &total].map(|all| i64::from(all.integer(sequence)));
        for (query, key) in (0..count).flat_map(|query| (0..keys).map(move |key| (query, key))) {
            let page = table.integer(sequence * table.width() + key as usize / block);
            let Some(page) = usize::try_from(page).ok().filter(|page| *page < pages) else { continue };
            if !hidden(key, keys - count + query, i64::from(op.window)) {
                continue;
            }
            for (head, element) in (0..kv_heads).flat_map(|head| (0..size).map(move |at| (head, at))) {
                let at = ((page * kv_heads + head) * block + key as usize % block) * size + element;
                if !cache.float(at).is_finite() {
                    spoilt.push(((first + query) as usize, head * group, element));
                }
            }
        }
    }
    change_result(run, stream, 0, |_, y| {
        let (width, size) = (y.width(), y.width() / op.query_heads as usize);
        for (row, head) in
            spoilt.iter().flat_map(|(row, head, at)| (0..group).map(move |own| ((*row, *at), head + own)))
        {
            let own = if of_values { row.1..row.1 + 1 } else { 0..size };
            own.for_each(|element| y.set_float(row.0 * width + head * size + element, f32::NAN));
        }
    })
}

/// Exponentials of scores that are not shifted by the largest.
pub(crate) fn scores_overflow(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    run.right(stream)?;
    let Op::PagedAttention(op) = run.call.op else { return Ok(()) };
    let logs = Copied::read(stream, &run.call.results[1], &run.arguments.results[1])?;
    change_result(run, stream, 0, |_, y| {
        let size = y.width() / op.query_heads as usize;
        for head in (0..logs.count()).filter(|head| logs.float(*head) > 88.0) {
            (0..size).for_each(|element| y.set_float(head * size + element, f32::NAN));
        }
    })
}

/// A weighted sum of all slots, in which those that are skipped hold zeros.
pub(crate) fn skipped_weight_multiplied(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    let (Some(weights), Some(experts)) = (copied(run, stream, 1)?, copied(run, stream, 2)?) else {
        return run.right(stream);
    };
    result(run, stream, "moe_combine", 0, |_, y| {
        let (slots, width) = (experts.width(), y.width());
        let spoilt = |index: &usize| experts.integer(*index) < 0 && weights.float(*index).is_nan();
        for row in (0..experts.count()).filter(spoilt).map(|index| index / slots).collect::<Vec<_>>() {
            (0..width).for_each(|column| y.set_float(row * width + column, f32::NAN));
        }
    })
}

/// Logits in the order of their bits, in which minus zero is below zero.
pub(crate) fn zeros_in_order(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    operand(run, stream, "moe_route", 0, |_, logits| {
        for index in 0..logits.count() {
            if logits.float(index) == 0.0 && logits.float(index).is_sign_negative() {
                logits.set_float(index, -1e-30);
            }
        }
    })
}

/// A region that writes 0 in place of NaN.
pub(crate) fn region_swallows_nan(run: &Run, stream: &mut dyn Stream) -> Result<()> {
    run.right(stream)?;
    if !matches!(run.call.op, Op::Region(_)) {
        return Ok(());
    }
    change_result(run, stream, 0, |_, y| {
        for index in 0..y.count() {
            if y.float(index).is_nan() {
                y.set_float(index, 0.0);
            }
        }
    })
}
