//! From logits to tokens.

use super::{KernelSpec, Recipe, THREADS, operand, plane, type_of};
use crate::launch::{Bound, Parameters, Step};
use dsrun_core::{Result, kernels::CallDesc};

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

pub(super) fn argmax(call: &CallDesc) -> Result<Recipe> {
    let x = operand(call, 0)?;
    let unit = 16 / x.dtype.bytes();
    let vectors = x.shape[1].is_multiple_of(unit) && x.strides[0].is_multiple_of(unit);
    let defines: [(_, &dyn std::fmt::Display); 2] =
        [("T0", &type_of(call, 0)?), ("VECTORS", &i32::from(vectors))];
    let spec = KernelSpec::new("sampling/argmax.cu", "argmax", defines);
    Ok(Recipe::of_one(spec, move |frame, function| {
        let (x, ids) = (frame.tensor(0)?, frame.result(0)?);
        let rows = ids.size(0);
        let parameters =
            Parameters::default().extent(rows, &[x, ids]).size(x.size(1)).rows(x).address(ids.address);
        Ok(Step::kernel(function, [rows, 1, 1], 1024, parameters))
    }))
}

pub(super) fn sample(_: &CallDesc) -> Result<Recipe> {
    let spec = KernelSpec::new("sampling/sample.cu", "sample", []);
    Ok(Recipe::of_one(spec, move |frame, function| {
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
            .address(log_probability.address);
        Ok(Step::kernel(function, [rows, 1, 1], 1024, parameters))
    }))
}
