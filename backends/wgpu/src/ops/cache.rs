//! Writing keys and values into the paged KV cache, and moving pages.

use super::launch::{CallPlan, Launch};
use dsrun_core::{Error, Result, TensorDesc, kernels::CallDesc};
use std::ops::Range;

const SOURCE: &str = include_str!("../../kernels/cache.wgsl");

/// A dispatch with one thread per element of the matrix `x`, which holds these elements of each head, for the layout of
/// `cache`.
fn of_matrix(entry: &'static str, x: &TensorDesc, cache: &TensorDesc, part: Range<usize>) -> Result<Launch> {
    let (&[rows, columns], &[_, _, block, _], &[_, head_stride, slot_stride, _]) =
        (x.shape.as_slice(), cache.shape.as_slice(), cache.strides.as_slice())
    else {
        return Err(Error::internal("a cache has four dimensions, and its rows form a matrix"));
    };
    let elements = rows.checked_mul(columns).ok_or_else(|| Error::unsupported("too many elements"))?;
    Launch::new(SOURCE, entry)
        .elements(elements)
        .size("columns", columns)?
        .size("block", block)?
        .size("head", part.len())?
        .size("head_offset", part.start)?
        .size("head_stride", head_stride)?
        .size("slot_stride", slot_stride)
}

/// All elements of a head of a cache.
fn whole(cache: &TensorDesc) -> Range<usize> {
    0..cache.shape.get(3).copied().unwrap_or(0)
}

fn operand(call: &CallDesc, index: usize) -> Result<&TensorDesc> {
    call.tensor(index).ok_or_else(|| Error::internal(format!("operand {index} is not a tensor")))
}

fn result(call: &CallDesc, index: usize) -> Result<&TensorDesc> {
    call.results.get(index).ok_or_else(|| Error::internal(format!("there is no result {index}")))
}

pub(super) fn kv_write(call: &CallDesc) -> Result<CallPlan> {
    let mut plan = CallPlan::default();
    for index in 0..2 {
        let (x, cache) = (operand(call, 2 + index)?, result(call, index)?);
        let launch = of_matrix("kv_write", x, cache, whole(cache))?.result("cache", call, index)?;
        let launch = launch.operand("x", call, 2 + index)?.operand("slots", call, 4)?;
        plan.launches.push(launch.flag("WRITE", true).flag("SAME", x.dtype == cache.dtype));
    }
    Ok(plan)
}

/// Two dispatches, for the first elements of each key and for the others.
pub(super) fn latent_write(call: &CallDesc) -> Result<CallPlan> {
    let cache = result(call, 0)?;
    let (&[_, heads, _, key], &[_, features]) = (cache.shape.as_slice(), operand(call, 1)?.shape.as_slice())
    else {
        return Err(Error::internal("a cache has four dimensions, and values two"));
    };
    let value = features / heads.max(1);
    let mut plan = CallPlan::default();
    for (index, part) in [(1, 0..value), (2, value..key)] {
        if part.is_empty() {
            continue;
        }
        let x = operand(call, index)?;
        let launch = of_matrix("kv_write", x, cache, part)?.result("cache", call, 0)?;
        let launch = launch.operand("x", call, index)?.operand("slots", call, 3)?;
        plan.launches.push(launch.flag("WRITE", true).flag("SAME", x.dtype == cache.dtype));
    }
    Ok(plan)
}

pub(super) fn page_gather(call: &CallDesc) -> Result<CallPlan> {
    let cache = operand(call, 0)?;
    let launch = of_matrix("move_pages", result(call, 0)?, cache, whole(cache))?;
    let launch = launch.operand("cache", call, 0)?.result("x", call, 0)?;
    Ok(launch.operand("pages", call, 1)?.flag("PAGES", true).flag("GATHER", true).into())
}

pub(super) fn page_scatter(call: &CallDesc) -> Result<CallPlan> {
    let cache = result(call, 0)?;
    let launch = of_matrix("move_pages", operand(call, 1)?, cache, whole(cache))?;
    let launch = launch.result("cache", call, 0)?.operand("x", call, 1)?;
    Ok(launch.operand("pages", call, 2)?.flag("PAGES", true).into())
}
