//! The paged KV cache.

use crate::{
    driver::{
        kernel_spec::KernelSpec,
        launch::{LaunchOp, Parameters},
    },
    ops::{KernelPlan, THREADS, frame::Bound, plane, type_of},
};
use dsrun_core::{Result, kernels::CallDesc};

/// Strides of page, head and slot: `struct Strides` of the kernels.
pub(super) fn strides(tensor: &Bound) -> [u64; 3] {
    [0, 1, 2].map(|dimension| tensor.stride(dimension) as u64)
}

pub(super) fn kv_write(call: &CallDesc) -> Result<KernelPlan> {
    let types: [(_, &dyn std::fmt::Display); 3] =
        [("T0", &type_of(call, 0)?), ("T1", &type_of(call, 2)?), ("T2", &type_of(call, 3)?)];
    let spec = KernelSpec::new("cache/cache.cu", "kv_write", types);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (keys, values) = (frame.result(0)?, frame.result(1)?);
        let (key, value, slots) = (frame.tensor(2)?, frame.tensor(3)?, frame.tensor(4)?);
        let (rows, heads) = (key.size(0), keys.size(1));
        let parameters = Parameters::default()
            .extent(rows, &[key, value, slots])
            .size(keys.size(0))
            .size(heads)
            .size(keys.size(2))
            .size(keys.size(3))
            .size(values.size(3))
            .address(keys.address)
            .words(strides(keys))
            .address(values.address)
            .words(strides(values))
            .rows(key)
            .rows(value)
            .address(slots.address);
        let grid = plane(rows, heads * (keys.size(3) + values.size(3)));
        Ok(LaunchOp::kernel(function, grid, THREADS, parameters))
    }))
}

/// The sizes of a cache and where it is, as the page kernels take them.
fn pages(parameters: Parameters, cache: &Bound) -> Parameters {
    let sizes = [0, 1, 2, 3].map(|dimension| cache.size(dimension));
    let parameters = sizes.into_iter().fold(parameters, Parameters::size);
    parameters.address(cache.address).words(strides(cache))
}

fn page_elements(cache: &Bound) -> usize {
    cache.size(1) * cache.size(2) * cache.size(3)
}

fn spec(call: &CallDesc, entry: &'static str) -> Result<KernelSpec> {
    let name = type_of(call, 0)?;
    Ok(KernelSpec::new("cache/cache.cu", entry, [("T0", &name), ("T1", &name), ("T2", &name)]))
}

pub(super) fn page_copy(call: &CallDesc) -> Result<KernelPlan> {
    Ok(KernelPlan::of_one(spec(call, "page_copy")?, move |frame, function| {
        let (cache, pairs) = (frame.result(0)?, frame.tensor(1)?);
        let parameters = pages(Parameters::default().extent(pairs.size(0), &[pairs]), cache).rows(pairs);
        Ok(LaunchOp::kernel(function, plane(pairs.size(0), page_elements(cache)), THREADS, parameters))
    }))
}

pub(super) fn page_gather(call: &CallDesc) -> Result<KernelPlan> {
    Ok(KernelPlan::of_one(spec(call, "page_gather")?, move |frame, function| {
        let (cache, index, y) = (frame.tensor(0)?, frame.tensor(1)?, frame.result(0)?);
        let parameters = pages(Parameters::default().extent(y.size(0), &[index, y]), cache);
        let parameters = parameters.address(index.address).rows(y);
        Ok(LaunchOp::kernel(function, plane(y.size(0), page_elements(cache)), THREADS, parameters))
    }))
}

pub(super) fn page_scatter(call: &CallDesc) -> Result<KernelPlan> {
    Ok(KernelPlan::of_one(spec(call, "page_scatter")?, move |frame, function| {
        let (cache, x, index) = (frame.result(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let parameters = pages(Parameters::default().extent(x.size(0), &[x, index]), cache);
        let parameters = parameters.rows(x).address(index.address);
        Ok(LaunchOp::kernel(function, plane(x.size(0), page_elements(cache)), THREADS, parameters))
    }))
}
