//! The paged KV cache: writing new keys and values, and moving pages.
//!
//! The cache of a layer is two states, `key_cache[P, heads, B, D]` and `value_cache[P, heads, B, D']`: `P` pages of `B`
//! slots each. Slot `s` is slot `s % B` of page `s / B`. The last dimension holds the row that a head has for a slot
//! ([`crate::cache_row`]).

use super::{
    Axis,
    DimensionKind::{Parallel, Whole},
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    signature::{TensorArgument, operand, result, updated},
};
use crate::{
    DType, Error, Result,
    cache_row::{CACHE_GROUP, CACHE_SCALE_BYTES, cache_head_size},
    tensor::TensorType,
};

/// The number of elements of a head of a cache operand, which must be known when the program is built.
///
/// # Errors
/// If it is symbolic, or no head has such rows.
pub(super) fn head_size(cache: TensorArgument<'_>) -> Result<usize> {
    let row = cache.known(3)?;
    cache_head_size(cache.dtype(), row).ok_or_else(|| {
        let message = format!(
            "is {row}, must be the size of a head and {CACHE_SCALE_BYTES} bytes for each {CACHE_GROUP} of its elements"
        );
        Error::invalid(message).at(cache.name()).field("shape[3]")
    })
}

attributes! {
    /// Writes the keys and values of this step's tokens into their slots.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `key_cache` | float `[P, heads, B, D]`, or i8 `[P, heads, B, D + 4 ceil(D / 32)]` | updated |
    /// | `value_cache` | as `key_cache`, with `D'` | updated |
    /// | `key` | float `[T, heads * D]` | |
    /// | `value` | float `[T, heads * D']` | |
    /// | `slots` | i32 `[T]` | the slot of row `t`; -1 skips; no slot twice |
    /// | → `key_cache`, `value_cache` | the operands, updated | |
    ///
    /// In a float cache, elements are rounded once if it has another element type.
    ///
    /// In an i8 cache, the `D` elements of a head of a row of `key` become `D` signed bytes `q`, and behind them a scale for each group of
    /// 32 elements (the last may have fewer), a little-endian f32 in four bytes. Groups are quantised as by
    /// [`super::QuantPerGroup`]: `scale = max_i |x[i]| / 127`, `q[i] = round(x[i] / scale)`, and all zeros if the scale is 0. If an
    /// element is infinite or NaN, the scale of its group is the NaN with the bits 0x7FC00000 and the bytes of the group are
    /// unspecified, so that all its elements read as NaN; other groups are not affected. The same holds for `value`.
    ///
    /// Slots outside the cache are treated as -1.
    KvWrite {}
}

impl Operation for KvWrite {
    const SIGNATURE: &'static Signature = &Signature {
        name: "kv_write",
        profile: Profile::LlmCore1,
        summary: "`cache[slots[t]] = key[t], value[t]`; -1 skips",
        operands: &[
            operand("key_cache", OperandKind::Cache),
            operand("value_cache", OperandKind::Cache),
            operand("key", OperandKind::Float),
            operand("value", OperandKind::Float),
            operand("slots", OperandKind::I32),
        ],
        results: &[updated("key_cache", 0), updated("value_cache", 1)],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let (keys, values) = (operands.tensor("key_cache")?, operands.tensor("value_cache")?);
        let [pages, heads, block, _] = keys.sizes()?;
        let [_, _, _, value_size] = values.sizes()?;
        values.expect_dtype(keys.dtype(), "element type of key_cache")?;
        values.expect_shape([pages, heads, block, value_size], "shape of key_cache")?;
        let [tokens, _] = operands.tensor("key")?.sizes()?;
        for (name, cache) in [("key", keys), ("value", values)] {
            let width = product(name, [cache.known(1)?, head_size(cache)?])?;
            operands
                .tensor(name)?
                .expect_shape([tokens, &width.into()], "heads times head size of the cache")?;
        }
        operands.tensor("slots")?.expect_shape([tokens], "rows of key")?;
        Ok(vec![keys.tensor_type().clone(), values.tensor_type().clone()])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let (keys, values) = (operands.tensor("key_cache")?, operands.tensor("value_cache")?);
        let [tokens, _] = operands.tensor("key")?.sizes()?;
        let [_, heads, _, key_size] = keys.sizes()?;
        let [_, _, _, value_size] = values.sizes()?;
        if keys.dtype() == DType::I8 {
            // A row is made of all elements of its head.
            return Ok(IndexMaps::new(
                [
                    ("rows", Parallel, tokens.clone()),
                    ("heads", Parallel, heads.clone()),
                    ("key", Whole, head_size(keys)?.into()),
                    ("value", Whole, head_size(values)?.into()),
                ],
                &[I8_CACHE, I8_CACHE, KEY_ROWS, VALUE_ROWS, &[Axis::Of(&[0])]],
                &[I8_CACHE, I8_CACHE],
            ));
        }
        const KEYS: &[Axis] = &[Axis::Gathered, Axis::Of(&[1]), Axis::Gathered, Axis::Of(&[2])];
        const VALUES: &[Axis] = &[Axis::Gathered, Axis::Of(&[1]), Axis::Gathered, Axis::Of(&[3])];
        Ok(IndexMaps::new(
            [
                ("rows", Parallel, tokens.clone()),
                ("heads", Parallel, heads.clone()),
                ("key", Parallel, key_size.clone()),
                ("value", Parallel, value_size.clone()),
            ],
            &[KEYS, VALUES, KEY_ROWS, VALUE_ROWS, &[Axis::Of(&[0])]],
            &[KEYS, VALUES],
        ))
    }
}

/// The map of an i8 cache onto an iteration space whose dimension 1 are its heads. An element needs all of its row, or at least the
/// scale.
pub(super) const I8_CACHE: &[Axis] = &[Axis::Gathered, Axis::Of(&[1]), Axis::Gathered, Axis::Gathered];

/// The maps of the new keys and values of a [`KvWrite`].
const KEY_ROWS: &[Axis] = &[Axis::Of(&[0]), Axis::Of(&[1, 2])];
const VALUE_ROWS: &[Axis] = &[Axis::Of(&[0]), Axis::Of(&[1, 3])];

attributes! {
    /// Gathers pages into rows: `y[i] = cache[pages[i]]`, flattened.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `cache` | float or i8 `[P, heads, B, D]` | `D` is the size of a row, scale included |
    /// | `pages` | i32 `[N]` | -1 skips: the row is not written |
    /// | → `y` | as `cache`, `[N, heads * B * D]` | |
    ///
    /// Exact. Pages outside the cache are treated as -1.
    PageGather {}
}

impl Operation for PageGather {
    const SIGNATURE: &'static Signature = &Signature {
        name: "page_gather",
        profile: Profile::LlmCore1,
        summary: "`y[i] = cache[pages[i]]`; -1 skips",
        operands: &[operand("cache", OperandKind::Cache), operand("pages", OperandKind::I32)],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let (cache, [pages]) = (operands.tensor("cache")?, operands.tensor("pages")?.sizes()?);
        cache.sizes::<4>()?;
        let width = product("cache", [cache.known(1)?, cache.known(2)?, cache.known(3)?])?;
        Ok(vec![TensorType { dtype: cache.dtype(), shape: vec![pages.clone(), width.into()] }])
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([4, 1], &[2]))
    }
}

attributes! {
    /// Scatters rows into pages, the inverse of [`PageGather`]: `cache[pages[i]] = x[i]`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `cache` | float or i8 `[P, heads, B, D]` | updated; `D` is the size of a row, scale included |
    /// | `x` | as `cache`, `[N, heads * B * D]` | |
    /// | `pages` | i32 `[N]` | -1 skips; no page twice |
    /// | → `cache` | the operand, updated | |
    ///
    /// Exact. Pages outside the cache are treated as -1.
    PageScatter {}
}

impl Operation for PageScatter {
    const SIGNATURE: &'static Signature = &Signature {
        name: "page_scatter",
        profile: Profile::LlmCore1,
        summary: "`cache[pages[i]] = x[i]`; -1 skips",
        operands: &[
            operand("cache", OperandKind::Cache),
            operand("x", OperandKind::Cache),
            operand("pages", OperandKind::I32),
        ],
        results: &[updated("cache", 0)],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let (cache, x, [pages]) =
            (operands.tensor("cache")?, operands.tensor("x")?, operands.tensor("pages")?.sizes()?);
        cache.sizes::<4>()?;
        let width = product("cache", [cache.known(1)?, cache.known(2)?, cache.known(3)?])?;
        x.expect_dtype(cache.dtype(), "element type of cache")?;
        x.expect_shape([pages, &width.into()], "pages times page size")?;
        Ok(vec![cache.tensor_type().clone()])
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([4, 2, 1], &[4]))
    }
}

/// The product of sizes; an overflow is an error of operand `name`.
pub(super) fn product<const N: usize>(name: &str, sizes: [usize; N]) -> Result<usize> {
    let product = sizes.into_iter().try_fold(1usize, |product, size| product.checked_mul(size));
    product.ok_or_else(|| Error::invalid(format!("sizes {sizes:?} overflow")).at(name).field("shape"))
}
