//! The paged KV cache.

use crate::{
    driver::{
        kernel_spec::KernelSpec,
        kernel_struct::{self, Pointer, declaration, kernel_struct},
        launch::LaunchOp,
    },
    ops::{
        KernelPlan, THREADS,
        bound::Bound,
        params::{ExtentParams, MatrixParams, Strides},
        plane, type_of,
    },
};
use dsrun_core::{Result, kernels::CallDesc};
use std::fmt::Display;

kernel_struct! {
    /// Parameters of `kv_write`.
    struct KvWriteParams {
        extent: ExtentParams = "Extent",
        pages: i64 = "i64",
        heads: i64 = "i64",
        /// Slots of a page.
        slots: i64 = "i64",
        key_size: i64 = "i64",
        value_size: i64 = "i64",
        keys: Pointer = "CACHE*",
        key_strides: Strides = "Strides",
        values: Pointer = "CACHE*",
        value_strides: Strides = "Strides",
        /// New keys.
        key: MatrixParams = "Matrix<const KEY>",
        /// New values.
        value: MatrixParams = "Matrix<const VALUE>",
        /// The slot of each row, counted through all pages.
        places: Pointer = "const int*",
    }
}

kernel_struct! {
    /// Parameters of `latent_write`.
    struct LatentWriteParams {
        extent: ExtentParams = "Extent",
        pages: i64 = "i64",
        heads: i64 = "i64",
        /// Slots of a page.
        slots: i64 = "i64",
        value_size: i64 = "i64",
        /// Elements behind the value of a head.
        rest_size: i64 = "i64",
        cache: Pointer = "CACHE*",
        strides: Strides = "Strides",
        /// New values.
        value: MatrixParams = "Matrix<const VALUE>",
        /// What follows the values in their keys.
        rest: MatrixParams = "Matrix<const REST>",
        /// The slot of each row, counted through all pages.
        places: Pointer = "const int*",
    }
}

kernel_struct! {
    /// A cache of keys or of values, which is moved page by page.
    struct PagedCache {
        first: Pointer = "CACHE*",
        strides: Strides = "Strides",
        pages: i64 = "i64",
        heads: i64 = "i64",
        /// Slots of a page.
        slots: i64 = "i64",
        /// Elements of a slot of a head.
        size: i64 = "i64",
    }
}

kernel_struct! {
    /// Parameters of `page_gather`.
    struct PageGatherParams {
        extent: ExtentParams = "Extent",
        cache: PagedCache = "PagedCache",
        /// The page of each row.
        index: Pointer = "const int*",
        y: MatrixParams = "Matrix<CACHE>",
    }
}

kernel_struct! {
    /// Parameters of `page_scatter`.
    struct PageScatterParams {
        extent: ExtentParams = "Extent",
        cache: PagedCache = "PagedCache",
        /// The page of each row.
        index: Pointer = "const int*",
        x: MatrixParams = "Matrix<const CACHE>",
    }
}

/// The generated header of these structs.
pub(super) fn params_header() -> (String, String) {
    let declarations = [
        declaration::<KvWriteParams>(),
        declaration::<LatentWriteParams>(),
        declaration::<PagedCache>(),
        declaration::<PageGatherParams>(),
        declaration::<PageScatterParams>(),
    ];
    kernel_struct::params_header("cache/cache", &declarations)
}

impl PagedCache {
    fn of(cache: &Bound) -> Self {
        let [pages, heads, slots, size] = [0, 1, 2, 3].map(|dimension| cache.size(dimension) as i64);
        Self { first: cache.address, strides: Strides::of(cache), pages, heads, slots, size }
    }
}

pub(super) fn kv_write(call: &CallDesc) -> Result<KernelPlan> {
    let spec = spec("kv_write", [type_of(call, 0)?, type_of(call, 2)?, type_of(call, 3)?, "f32"]);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let (keys, values) = (frame.result(0)?, frame.result(1)?);
        let (key, value, slots) = (frame.tensor(2)?, frame.tensor(3)?, frame.tensor(4)?);
        let (rows, heads) = (key.size(0), keys.size(1));
        let params = KvWriteParams {
            extent: ExtentParams::of(rows, &[key, value, slots]),
            pages: keys.size(0) as i64,
            heads: heads as i64,
            slots: keys.size(2) as i64,
            key_size: keys.size(3) as i64,
            value_size: values.size(3) as i64,
            keys: keys.address,
            key_strides: Strides::of(keys),
            values: values.address,
            value_strides: Strides::of(values),
            key: MatrixParams::of(key),
            value: MatrixParams::of(value),
            places: slots.address,
        };
        let grid = plane(rows, heads * (keys.size(3) + values.size(3)));
        Ok(LaunchOp::kernel(function, grid, THREADS, &params))
    }))
}

pub(super) fn latent_write(call: &CallDesc) -> Result<KernelPlan> {
    let [cache, value, rest] = [type_of(call, 0)?, type_of(call, 1)?, type_of(call, 2)?];
    let spec = spec("latent_write", [cache, "f32", value, rest]);
    Ok(KernelPlan::of_one(spec, move |frame, function| {
        let cache = frame.result(0)?;
        let (value, rest, slots) = (frame.tensor(1)?, frame.tensor(2)?, frame.tensor(3)?);
        let (rows, heads) = (value.size(0), cache.size(1));
        let params = LatentWriteParams {
            extent: ExtentParams::of(rows, &[value, rest, slots]),
            pages: cache.size(0) as i64,
            heads: heads as i64,
            slots: cache.size(2) as i64,
            value_size: (value.size(1) / heads.max(1)) as i64,
            rest_size: (rest.size(1) / heads.max(1)) as i64,
            cache: cache.address,
            strides: Strides::of(cache),
            value: MatrixParams::of(value),
            rest: MatrixParams::of(rest),
            places: slots.address,
        };
        Ok(LaunchOp::kernel(function, plane(rows, heads * cache.size(3)), THREADS, &params))
    }))
}

fn page_elements(cache: &Bound) -> usize {
    cache.size(1) * cache.size(2) * cache.size(3)
}

/// A kernel for a cache, keys, values and the rests of keys of these types.
fn spec(entry: &'static str, [cache, key, value, rest]: [&'static str; 4]) -> KernelSpec {
    let types: [(_, &dyn Display); 4] =
        [("CACHE", &cache), ("KEY", &key), ("VALUE", &value), ("REST", &rest)];
    KernelSpec::new("cache/cache.cu", entry, types)
}

pub(super) fn page_gather(call: &CallDesc) -> Result<KernelPlan> {
    Ok(KernelPlan::of_one(spec("page_gather", [type_of(call, 0)?; 4]), move |frame, function| {
        let (cache, index, y) = (frame.tensor(0)?, frame.tensor(1)?, frame.result(0)?);
        let params = PageGatherParams {
            extent: ExtentParams::of(y.size(0), &[index, y]),
            cache: PagedCache::of(cache),
            index: index.address,
            y: MatrixParams::of(y),
        };
        Ok(LaunchOp::kernel(function, plane(y.size(0), page_elements(cache)), THREADS, &params))
    }))
}

pub(super) fn page_scatter(call: &CallDesc) -> Result<KernelPlan> {
    Ok(KernelPlan::of_one(spec("page_scatter", [type_of(call, 0)?; 4]), move |frame, function| {
        let (cache, x, index) = (frame.result(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let params = PageScatterParams {
            extent: ExtentParams::of(x.size(0), &[x, index]),
            cache: PagedCache::of(cache),
            index: index.address,
            x: MatrixParams::of(x),
        };
        Ok(LaunchOp::kernel(function, plane(x.size(0), page_elements(cache)), THREADS, &params))
    }))
}
