//! Latent attention: linear layers of single heads, and the cache of keys that contain their values.
//!
//! Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024) caches one vector per token for all heads: the latent, from
//! which the keys and values of all heads are linear functions, and behind it the part of the key that is rotated. A query is
//! multiplied by its head's key projection before it meets the cache, and what attention returns by the head's value
//! projection, so that neither keys nor values are ever expanded.

use super::{
    Axis,
    DimensionKind::{Parallel, Reduced, Whole},
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    cache::product,
    linear::check_float,
    signature::{operand, result, updated},
};
use crate::{DType, Error, Result, tensor::TensorType};

attributes! {
    /// A linear layer of each head: `y[t, h, n] = sum_k x[t, h, k] * weight[h, n, k]`, and behind it the rest of the head.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `x` | float `[T, heads * (K + R)]` | |
    /// | `weight` | weight `[heads * N, K]` | the matrices of all heads, one after the other, in any format |
    /// | → `y` | `dtype` `[T, heads * (N + R)]` | |
    ///
    /// The first `K` elements of a head of `x` are multiplied. The other `R >= 0` are copied behind the `N` products of the head,
    /// and rounded if `dtype` is another type. Rounding of products is that of [`super::Linear`].
    HeadLinear {
        /// The element type of the result; a float.
        dtype: DType,
        /// The number of heads.
        heads: u32,
    }
}

/// The sizes of a [`HeadLinear`].
struct HeadSizes {
    heads: usize,
    inputs: usize,
    outputs: usize,
    /// The elements of a head that are copied.
    rest: usize,
}

impl HeadLinear {
    fn sizes(&self, operands: &Operands<'_>) -> Result<HeadSizes> {
        let (heads, width) = (self.heads as usize, operands.tensor("x")?.known(1)?);
        if heads == 0 || !width.is_multiple_of(heads) {
            let message = format!("is {heads}, must divide {width} (features of x)");
            return Err(Error::invalid(message).at("heads"));
        }
        let (rows, inputs) = operands.weight("weight")?;
        if !rows.is_multiple_of(heads) {
            let message = format!("is {rows}, must be a multiple of {heads} (heads)");
            return Err(Error::invalid(message).at("weight").field("shape[0]"));
        }
        let rest = (width / heads).checked_sub(inputs).ok_or_else(|| {
            let message = format!("is {inputs}, must be at most {} (size of a head of x)", width / heads);
            Error::invalid(message).at("weight").field("shape[1]")
        })?;
        Ok(HeadSizes { heads, inputs, outputs: rows / heads, rest })
    }
}

impl Operation for HeadLinear {
    const SIGNATURE: &'static Signature = &Signature {
        name: "head_linear",
        profile: Profile::LlmMla1,
        summary: "`y[t, h] = x[t, h, ..K] . weight[h], x[t, h, K..]`: a linear layer of each head",
        operands: &[operand("x", OperandKind::Float), operand("weight", OperandKind::Weight)],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let [rows, _] = operands.tensor("x")?.sizes()?;
        let HeadSizes { heads, outputs, rest, .. } = self.sizes(operands)?;
        let head = outputs.saturating_add(rest);
        let width = product("weight", [heads, head])?;
        check_float(self.dtype)?;
        Ok(vec![TensorType { dtype: self.dtype, shape: vec![rows.clone(), width.into()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [rows, _] = operands.tensor("x")?.sizes()?;
        let HeadSizes { heads, inputs, outputs, rest } = self.sizes(operands)?;
        if heads == 1 {
            // Nothing can be divided: a part of a head has no part of the weight.
            return Ok(IndexMaps::opaque([2, 2], &[2]));
        }
        Ok(IndexMaps::new(
            [
                ("rows", Parallel, rows.clone()),
                ("heads", Parallel, heads.into()),
                ("head", Reduced, (inputs + rest).into()),
                ("outputs", Reduced, outputs.into()),
                ("result", Whole, (outputs + rest).into()),
            ],
            &[&[Axis::Of(&[0]), Axis::Of(&[1, 2])], &[Axis::Of(&[1, 3]), Axis::Gathered]],
            &[&[Axis::Of(&[0]), Axis::Of(&[1, 4])]],
        ))
    }
}

attributes! {
    /// Writes the values of this step's tokens, and behind each the rest of its key, into their slots.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `cache` | float `[P, heads, B, D + R]` | updated |
    /// | `value` | float `[T, heads * D]` | the first elements of the keys |
    /// | `rest` | float `[T, heads * R]` | the other elements |
    /// | `slots` | i32 `[T]` | the slot of row `t`; -1 skips; no slot twice |
    /// | → `cache` | the operand, updated | |
    ///
    /// Such a cache is for [`super::PagedAttention`] with `value_size = D`. Elements are rounded once if the cache has another
    /// element type. Slots outside the cache are treated as -1.
    LatentWrite {}
}

impl Operation for LatentWrite {
    const SIGNATURE: &'static Signature = &Signature {
        name: "latent_write",
        profile: Profile::LlmMla1,
        summary: "`cache[slots[t]] = value[t], rest[t]` in one cache; -1 skips",
        operands: &[
            operand("cache", OperandKind::Float),
            operand("value", OperandKind::Float),
            operand("rest", OperandKind::Float),
            operand("slots", OperandKind::I32),
        ],
        results: &[updated("cache", 0)],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let cache = operands.tensor("cache")?;
        let [_, heads, _, _] = cache.sizes()?;
        let (count, size) = (cache.known(1)?, cache.known(3)?);
        let (value, rest) = (operands.tensor("value")?, operands.tensor("rest")?);
        let [tokens, _] = value.sizes()?;
        for (name, tensor) in [("value", value), ("rest", rest)] {
            tensor.sizes::<2>()?;
            let width = tensor.known(1)?;
            if count == 0 || !width.is_multiple_of(count) {
                let message = format!("is {width}, must be a multiple of {heads} (heads of cache)");
                return Err(Error::invalid(message).at(name).field("shape[1]"));
            }
        }
        let own = value.known(1)? / count;
        let Some(left) = size.checked_sub(own) else {
            let message = format!("is {own} for each head, must be at most {size} (size of a key)");
            return Err(Error::invalid(message).at("value").field("shape[1]"));
        };
        let width = product("rest", [count, left])?;
        rest.expect_shape([tokens, &width.into()], "heads times the rest of a key")?;
        operands.tensor("slots")?.expect_shape([tokens], "rows of value")?;
        Ok(vec![cache.tensor_type().clone()])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let cache = operands.tensor("cache")?;
        let [tokens, _] = operands.tensor("value")?.sizes()?;
        let (heads, size) = (cache.known(1)?, cache.known(3)?);
        let value = operands.tensor("value")?.known(1)? / heads.max(1);
        const CACHE: &[Axis] = &[Axis::Gathered, Axis::Of(&[1]), Axis::Gathered, Axis::Of(&[2])];
        Ok(IndexMaps::new(
            [
                ("rows", Parallel, tokens.clone()),
                ("heads", Parallel, heads.into()),
                ("key", Whole, size.into()),
                ("value", Whole, value.into()),
                ("rest", Whole, (size - value).into()),
            ],
            &[
                CACHE,
                &[Axis::Of(&[0]), Axis::Of(&[1, 3])],
                &[Axis::Of(&[0]), Axis::Of(&[1, 4])],
                &[Axis::Of(&[0])],
            ],
            &[CACHE],
        ))
    }
}
