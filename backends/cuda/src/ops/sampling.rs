//! From logits to tokens.

use super::{KernelSpec, Machine, Recipe, THREADS, operand, plane, type_of};
use crate::launch::{Bound, MAX_GRID, Parameters, Step};
use dsrun_core::{Result, kernels::CallDesc};

/// Threads of a block of `argmax`, and the most blocks that share a row: a thread of the last one each.
const ARGMAX_THREADS: usize = 512;
const MAX_SPLITS: usize = 64;
/// Threads of a block of `sample`, and the bytes of what it leaves.
const SAMPLE_THREADS: usize = 1024;
const SHARE: usize = 32;

fn optional_rows(parameters: Parameters, tensor: Option<&Bound>) -> Parameters {
    match tensor {
        Some(tensor) => parameters.rows(tensor),
        None => parameters.address(0).size(0),
    }
}

pub(super) fn logit_process(call: &CallDesc) -> Result<Recipe> {
    let spec = KernelSpec::new("sampling/logits.cu", "logit_process", [("T0", &type_of(call, 0)?)]);
    Ok(Recipe::of_one(spec, move |frame, function| {
        let (logits, requests, settings) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let (counts, y) = (frame.tensor(3)?, frame.result(0)?);
        let (rows, vocabulary) = (y.size(0), y.size(1));
        let mut bounds = vec![logits, requests, y];
        bounds.extend(frame.optional(5));
        let parameters = Parameters::default()
            .extent(rows, &bounds)
            .size(vocabulary)
            .size(settings.size(0))
            .rows(logits)
            .address(requests.address)
            .rows(settings)
            .rows(counts);
        let parameters =
            optional_rows(optional_rows(parameters, frame.optional(4)), frame.optional(5)).rows(y);
        Ok(Step::kernel(function, plane(rows, vocabulary), THREADS, parameters))
    }))
}

pub(super) fn argmax(call: &CallDesc, machine: &Machine) -> Result<Recipe> {
    let x = operand(call, 0)?;
    let unit = 16 / x.dtype.bytes();
    let vectors = x.shape[1].is_multiple_of(unit) && x.strides[0].is_multiple_of(unit);
    // Four vectors for each thread of a block.
    let rows = x.shape[0];
    let most = (machine.processors / rows.max(1)).clamp(1, MAX_SPLITS);
    let splits = x.shape[1].div_ceil(ARGMAX_THREADS * 4 * unit).clamp(1, most);
    let defines: [(_, &dyn std::fmt::Display); 3] =
        [("T0", &type_of(call, 0)?), ("VECTORS", &i32::from(vectors)), ("SPLITS", &splits)];
    let spec = KernelSpec::new("sampling/argmax.cu", "argmax", defines);
    let mut recipe = Recipe::of_one(spec, move |frame, function| {
        let (x, ids) = (frame.tensor(0)?, frame.result(0)?);
        let parameters = Parameters::default().extent(rows, &[x, ids]).size(x.size(1)).rows(x);
        let parameters = parameters.address(ids.address).address(frame.workspace).address(frame.persistent);
        Ok(Step::kernel(function, [splits, rows.min(MAX_GRID), 1], ARGMAX_THREADS, parameters))
    });
    if splits > 1 {
        recipe.workspace = rows * splits * 8;
        recipe.persistent = rows * 4;
    }
    Ok(recipe)
}

pub(super) fn sample(call: &CallDesc, machine: &Machine) -> Result<Recipe> {
    let logits = operand(call, 0)?;
    let rows = logits.shape[0];
    let most = (machine.processors / rows.max(1)).clamp(1, MAX_SPLITS);
    // Four logits for each thread of a block.
    let splits = logits.shape[1].div_ceil(SAMPLE_THREADS * 4).clamp(1, most);
    let spec = KernelSpec::new("sampling/sample.cu", "sample", [("SPLITS", &splits)]);
    let mut recipe = Recipe::of_one(spec, move |frame, function| {
        let (logits, requests, positions) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let (settings, seeds) = (frame.tensor(3)?, frame.tensor(4)?);
        let (ids, log_probability) = (frame.result(0)?, frame.result(1)?);
        let rows = ids.size(0);
        let parameters = Parameters::default()
            .extent(rows, &[logits, requests, positions, ids, log_probability])
            .size(logits.size(1))
            .size(settings.size(0).min(seeds.size(0)))
            .rows(logits)
            .address(requests.address)
            .address(positions.address)
            .rows(settings)
            .rows(seeds)
            .address(ids.address)
            .address(log_probability.address)
            .address(frame.workspace)
            .address(frame.persistent);
        Ok(Step::kernel(function, [rows, splits, 1], SAMPLE_THREADS, parameters))
    });
    if splits > 1 {
        recipe.workspace = rows * splits * SHARE;
        recipe.persistent = rows * 4;
    }
    Ok(recipe)
}
