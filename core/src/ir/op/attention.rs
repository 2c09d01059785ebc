//! Attention: the work list of a step, attention over the paged KV cache, and attention without a cache.
//!
//! A step is ragged: sequence `s` has `query_length[s]` new tokens, which are rows `query_start[s] ..` of the batch, and
//! `kv_length[s]` tokens in all, including the new ones. The position of its new token `j` is
//! `kv_length[s] - query_length[s] + j`. A padded sequence has no queries and no keys. A sequence may have keys and no queries;
//! then the step computes nothing for it. If it has fewer keys than queries, the first positions are negative.

use super::{
    Axis,
    DimensionKind::{Parallel, Reduced, Whole},
    IndexMaps, OperandKind, Operands, Operation, Profile, Signature, attributes,
    attributes::choice,
    cache::{I8_CACHE, head_size, product},
    index_map::ABSENT,
    signature::{operand, optional, result},
};
use crate::{
    DType, Error, Result,
    tensor::{Size, TensorType},
};

choice! {
    /// The keys that a query attends to.
    AttentionMask {
        /// Those at its own position and before it.
        Causal = 1 "causal",
        /// All keys of its sequence.
        Bidirectional = 2 "bidirectional",
        /// All keys before this step's tokens, and those of this step whose bit is set in `mask_bits`, for token trees.
        Explicit = 3 "explicit",
    }
}

attributes! {
    /// Makes the work list that all attention calls of a step share.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `query_start`, `query_length`, `kv_length` | i32 `[S]` | |
    /// | → `work` | i32 `[words]` | private to the backend |
    ///
    /// The content of the list is private to the backend; `words` is the length that the backend asks for when queried. A
    /// backend that needs no list asks for 0.
    AttentionPrepare {
        /// The length of the work list.
        words: u32,
    }
}

impl Operation for AttentionPrepare {
    const SIGNATURE: &'static Signature = &Signature {
        name: "attention_prepare",
        profile: Profile::LlmCore1,
        summary: "makes the backend's work list for this step's attention calls",
        operands: &[
            operand("query_start", OperandKind::I32),
            operand("query_length", OperandKind::I32),
            operand("kv_length", OperandKind::I32),
        ],
        results: &[result("work")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let [sequences] = operands.tensor("query_start")?.sizes()?;
        operands.tensor("query_length")?.expect_shape([sequences], "one per sequence")?;
        operands.tensor("kv_length")?.expect_shape([sequences], "one per sequence")?;
        Ok(vec![TensorType::new(DType::I32, [self.words as usize])])
    }

    fn index_maps(&self, _: &Operands<'_>) -> Result<IndexMaps> {
        Ok(IndexMaps::opaque([1, 1, 1], &[1]))
    }
}

attributes! {
    /// Attention of this step's queries over the paged KV cache, for any mix of prefill chunks and decode tokens.
    ///
    /// For query head `h` of token `t` at position `p` of sequence `s`, over the keys `i < kv_length[s]` it attends to:
    /// `score_i = softcap(scale * q . k_i) - alibi[h] * (p - i)`, `w = softmax(score)`, `y = sum_i w_i v_i`, with
    /// `softcap(x) = c * tanh(x / c)`. Query head `h` reads KV head `h / (query_heads / kv_heads)`. Key `i` is slot
    /// `i % B` of page `block_table[s, i / B]`.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `query` | float `[T, query_heads * D]` | a row of no sequence is skipped: its result is not written |
    /// | `key_cache` | float `[P, kv_heads, B, D]`, or i8 `[P, kv_heads, B, D + 4 ceil(D / 32)]` | this step's keys are already in it |
    /// | `value_cache` | as `key_cache`, with `D'` | absent if `value_size` is not 0 |
    /// | `query_start`, `query_length`, `kv_length` | i32 `[S]` | |
    /// | `block_table` | i32 `[S, N]` | -1 after the last page, and for a page that is not there: its keys are attended to by none |
    /// | `work` | i32 `[words]` | the result of [`AttentionPrepare`] |
    /// | `alibi` | f32 `[query_heads]`, optional | slopes |
    /// | `sinks` | f32 `[query_heads]`, optional | one more score in each softmax, without a value |
    /// | `mask_bits` | u32 `[T, ceil(L / 32)]`, with mask `explicit` | bit `j` of row `t`: it attends to token `j < L` of its sequence in this step |
    /// | → `y` | as `query`, `[T, query_heads * D']` | |
    /// | → `log_sum_exp` | f32 `[T, query_heads]` | of the scores, sinks included |
    ///
    /// With `value_size = n > 0` there is one cache: the value of a key is its first `n` elements, and `D' = n`. Only `llm-mla-1`
    /// requires that.
    ///
    /// Rows of an i8 cache end with scales, as [`super::KvWrite`] writes them: an element of `k_i` or `v_i` is its byte times the scale
    /// of its group, in f32 or better. Such caches have values of their own (`value_size = 0`), and no profile requires them.
    ///
    /// With `window = w > 0` a query attends to no key at `i <= p - w`; pages that the windows of all queries have left may be -1.
    /// For a query that attends to no key `y` is zero, and `log_sum_exp` is its sink or minus infinity. What keys hold that a query
    /// does not attend to reaches no result of it, NaN and infinity included; nor does what values of f32 hold. NaN and infinity in
    /// values of 16 bits or of i8 may reach all queries of their sequence: kernels multiply tiles of them by weights of 0. Results are
    /// undefined if a score is plus infinity, or if all are minus infinity. Scores and sums are computed in f32 or better; softmax
    /// weights may be rounded to the element type of a float cache before they multiply values (one inner rounding); the result is
    /// rounded once.
    PagedAttention {
        /// The number of heads of `query`, a multiple of `kv_heads`.
        query_heads: u32,
        /// The number of heads of the caches.
        kv_heads: u32,
        /// The factor of every score.
        scale: f32,
        /// The bound `c` of the soft cap; 0 means none.
        softcap: f32,
        /// The number of positions that a query attends to, including its own; 0 means all.
        window: u32,
        /// The keys that a query attends to.
        mask: AttentionMask,
        /// The number of leading elements of each key that are its value; 0 if values are in `value_cache`.
        value_size: u32,
    }
}

impl PagedAttention {
    fn group(&self) -> Result<usize> {
        group(self.query_heads, self.kv_heads)
    }

    /// The size of a value head.
    fn value_head(&self, operands: &Operands<'_>) -> Result<usize> {
        let keys = operands.tensor("key_cache")?;
        let (dtype, key_size, shared) = (keys.dtype(), keys.known(3)?, self.value_size as usize);
        match operands.optional("value_cache") {
            None if shared == 0 => Err(Error::invalid("is missing (value_size is 0)").at("value_cache")),
            None if dtype == DType::I8 => {
                let message =
                    format!("is i8, must be float: values are part of their keys (value_size is {shared})");
                Err(Error::invalid(message).at("key_cache").field("dtype"))
            }
            None if shared > key_size => {
                let message = format!("is {shared}, must be at most {key_size} (size of a key)");
                Err(Error::invalid(message).at("value_size"))
            }
            None => Ok(shared),
            Some(_) if shared > 0 => {
                Err(Error::invalid(format!("must be absent (value_size is {shared})")).at("value_cache"))
            }
            Some(values) => head_size(values),
        }
    }
}

impl Operation for PagedAttention {
    const SIGNATURE: &'static Signature = &Signature {
        name: "paged_attention",
        profile: Profile::LlmCore1,
        summary: "softmax attention of ragged queries over the paged KV cache",
        operands: &[
            operand("query", OperandKind::Float),
            operand("key_cache", OperandKind::Cache),
            optional("value_cache", OperandKind::Cache),
            operand("query_start", OperandKind::I32),
            operand("query_length", OperandKind::I32),
            operand("kv_length", OperandKind::I32),
            operand("block_table", OperandKind::I32),
            operand("work", OperandKind::I32),
            optional("alibi", OperandKind::F32),
            optional("sinks", OperandKind::F32),
            optional("mask_bits", OperandKind::U32),
        ],
        results: &[result("y"), result("log_sum_exp")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let (query, keys) = (operands.tensor("query")?, operands.tensor("key_cache")?);
        self.group()?;
        check_numbers(self.scale, self.softcap)?;
        let [tokens, _] = query.sizes()?;
        let [_, _, _, key_size] = keys.sizes()?;
        keys.expect(1, &(self.kv_heads as usize).into(), "kv_heads")?;
        if let Some(values) = operands.optional("value_cache") {
            let [pages, heads, block, _] = values.sizes()?;
            keys.expect_shape([pages, heads, block, key_size], "shape of value_cache")?;
            values.expect_dtype(keys.dtype(), "element type of key_cache")?;
        }
        let value_size = self.value_head(operands)?;
        if keys.known(2)? == 0 {
            return Err(Error::invalid("is 0, but a page needs at least one slot")
                .at("key_cache")
                .field("shape[2]"));
        }
        let query_width = product("key_cache", [self.query_heads as usize, head_size(keys)?])?;
        query.expect(1, &query_width.into(), "query_heads times head size")?;
        let [sequences] = operands.tensor("query_start")?.sizes()?;
        operands.tensor("query_length")?.expect_shape([sequences], "one per sequence")?;
        operands.tensor("kv_length")?.expect_shape([sequences], "one per sequence")?;
        let table = operands.tensor("block_table")?;
        table.sizes::<2>()?;
        table.expect(0, sequences, "one row per sequence")?;
        operands.tensor("work")?.sizes::<1>()?;
        for vector in [operands.optional("alibi"), operands.optional("sinks")].into_iter().flatten() {
            vector.expect_shape([&(self.query_heads as usize).into()], "query_heads")?;
        }
        match (self.mask, operands.optional("mask_bits")) {
            (AttentionMask::Explicit, None) => {
                return Err(Error::invalid("is missing (mask is explicit)").at("mask_bits"));
            }
            (AttentionMask::Explicit, Some(bits)) => {
                bits.sizes::<2>()?;
                bits.expect(0, tokens, "rows of query")?;
            }
            (_, Some(_)) => {
                return Err(Error::invalid("must be absent unless the mask is explicit").at("mask_bits"));
            }
            (_, None) => {}
        }
        let width = product("value_cache", [self.query_heads as usize, value_size])?;
        Ok(vec![
            TensorType { dtype: query.dtype(), shape: vec![tokens.clone(), width.into()] },
            TensorType { dtype: DType::F32, shape: vec![tokens.clone(), (self.query_heads as usize).into()] },
        ])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [tokens, _] = operands.tensor("query")?.sizes()?;
        let keys = operands.tensor("key_cache")?;
        let (key_size, value_size) = (head_size(keys)?, self.value_head(operands)?);
        let mut space = head_space(tokens, self.kv_heads, self.group()?, key_size, value_size);
        let is_i8 = keys.dtype() == DType::I8;
        if self.value_size > 0 || is_i8 {
            // The elements of values are among those of keys, all of which every score needs; or they need the scale of their row.
            space[4].1 = Whole;
        }
        let [key_axes, value_axes] = if is_i8 { [I8_CACHE; 2] } else { [KEY_CACHE, VALUE_CACHE] };
        let absent_or =
            |name, axes: &'static [Axis]| if operands.optional(name).is_some() { axes } else { ABSENT };
        Ok(IndexMaps::new(
            space,
            &[
                &[Axis::Of(&[0]), Axis::Of(&[1, 2, 3])],
                key_axes,
                absent_or("value_cache", value_axes),
                &[Axis::Gathered],
                &[Axis::Gathered],
                &[Axis::Gathered],
                &[Axis::Gathered, Axis::Gathered],
                &[Axis::Gathered],
                absent_or("alibi", &[Axis::Of(&[1, 2])]),
                absent_or("sinks", &[Axis::Of(&[1, 2])]),
                absent_or("mask_bits", &[Axis::Of(&[0]), Axis::Gathered]),
            ],
            &[&[Axis::Of(&[0]), Axis::Of(&[1, 2, 4])], &[Axis::Of(&[0]), Axis::Of(&[1, 2])]],
        ))
    }
}

/// The maps of float caches.
const KEY_CACHE: &[Axis] = &[Axis::Gathered, Axis::Of(&[1]), Axis::Gathered, Axis::Of(&[3])];
const VALUE_CACHE: &[Axis] = &[Axis::Gathered, Axis::Of(&[1]), Axis::Gathered, Axis::Of(&[4])];

attributes! {
    /// Attention within ragged sequences, without a cache, as encoders use it.
    ///
    /// It computes what [`PagedAttention`] does, where key `i` of sequence `s` is row `start[s] + i` of `key` and `value`, and
    /// each sequence has as many keys as queries.
    ///
    /// | operand | type | |
    /// |---|---|---|
    /// | `query` | float `[T, query_heads * D]` | |
    /// | `key` | as `query`, `[T, kv_heads * D]` | |
    /// | `value` | as `query`, `[T, kv_heads * D']` | |
    /// | `start`, `length` | i32 `[S]` | rows of each sequence |
    /// | `alibi` | f32 `[query_heads]`, optional | slopes |
    /// | → `y` | as `query`, `[T, query_heads * D']` | |
    ///
    /// The mask is causal or bidirectional. Bidirectional ALiBi uses the distance `|p - i|`, and a bidirectional window
    /// covers the keys with `|p - i| < window`.
    Attention {
        /// The number of heads of `query`, a multiple of `kv_heads`.
        query_heads: u32,
        /// The number of heads of `key` and `value`.
        kv_heads: u32,
        /// The factor of every score.
        scale: f32,
        /// The bound `c` of the soft cap; 0 means none.
        softcap: f32,
        /// The window in positions, including the query's own; 0 means all.
        window: u32,
        /// The keys that a query attends to; not explicit.
        mask: AttentionMask,
    }
}

impl Attention {
    /// The sizes of a key head and of a value head.
    fn head_sizes(&self, operands: &Operands<'_>) -> Result<(usize, usize)> {
        let heads = self.kv_heads as usize;
        let size = |name| {
            let width = operands.tensor(name)?.known(1)?;
            if width.is_multiple_of(heads) {
                return Ok(width / heads);
            }
            let message = format!("is {width}, must be a multiple of {heads} (kv_heads)");
            Err(Error::invalid(message).at(name).field("shape[1]"))
        };
        group(self.query_heads, self.kv_heads)?;
        Ok((size("key")?, size("value")?))
    }
}

impl Operation for Attention {
    const SIGNATURE: &'static Signature = &Signature {
        name: "attention",
        profile: Profile::LlmCore1,
        summary: "softmax attention within ragged sequences, without a cache",
        operands: &[
            operand("query", OperandKind::Float),
            operand("key", OperandKind::Float),
            operand("value", OperandKind::Float),
            operand("start", OperandKind::I32),
            operand("length", OperandKind::I32),
            optional("alibi", OperandKind::F32),
        ],
        results: &[result("y")],
    };

    fn infer(&self, operands: &Operands<'_>) -> Result<Vec<TensorType>> {
        let query = operands.tensor("query")?;
        let [tokens, _] = query.sizes()?;
        check_numbers(self.scale, self.softcap)?;
        if self.mask == AttentionMask::Explicit {
            return Err(
                Error::invalid("is explicit, which attention without a cache does not support").at("mask")
            );
        }
        for name in ["key", "value"] {
            let tensor = operands.tensor(name)?;
            tensor.sizes::<2>()?;
            tensor.expect(0, tokens, "rows of query")?;
            tensor.expect_dtype(query.dtype(), "element type of query")?;
        }
        let (key_size, value_size) = self.head_sizes(operands)?;
        let heads = self.query_heads as usize;
        query.expect(1, &product("key", [heads, key_size])?.into(), "query_heads times head size")?;
        let [sequences] = operands.tensor("start")?.sizes()?;
        operands.tensor("length")?.expect_shape([sequences], "one per sequence")?;
        if let Some(alibi) = operands.optional("alibi") {
            alibi.expect_shape([&heads.into()], "query_heads")?;
        }
        let width = product("value", [heads, value_size])?;
        Ok(vec![TensorType { dtype: query.dtype(), shape: vec![tokens.clone(), width.into()] }])
    }

    fn index_maps(&self, operands: &Operands<'_>) -> Result<IndexMaps> {
        let [tokens, _] = operands.tensor("query")?.sizes()?;
        let (key_size, value_size) = self.head_sizes(operands)?;
        let alibi = if operands.optional("alibi").is_some() { &[Axis::Of(&[1, 2])] } else { ABSENT };
        Ok(IndexMaps::new(
            head_space(tokens, self.kv_heads, group(self.query_heads, self.kv_heads)?, key_size, value_size),
            &[
                &[Axis::Of(&[0]), Axis::Of(&[1, 2, 3])],
                &[Axis::Gathered, Axis::Of(&[1, 3])],
                &[Axis::Gathered, Axis::Of(&[1, 4])],
                &[Axis::Gathered],
                &[Axis::Gathered],
                alibi,
            ],
            &[&[Axis::Of(&[0]), Axis::Of(&[1, 2, 4])]],
        ))
    }
}

/// The number of query heads per KV head.
fn group(query_heads: u32, kv_heads: u32) -> Result<usize> {
    if kv_heads > 0 && query_heads > 0 && query_heads.is_multiple_of(kv_heads) {
        return Ok((query_heads / kv_heads) as usize);
    }
    Err(Error::invalid(format!("is {query_heads}, must be a multiple of {kv_heads} (kv_heads)"))
        .at("query_heads"))
}

fn check_numbers(scale: f32, softcap: f32) -> Result<()> {
    if !scale.is_finite() {
        return Err(Error::invalid(format!("is {scale}, must be finite")).at("scale"));
    }
    if !softcap.is_finite() || softcap < 0.0 {
        return Err(Error::invalid(format!("is {softcap}, must be finite and not negative")).at("softcap"));
    }
    Ok(())
}

/// The iteration space of tokens, KV heads, query heads per KV head, key elements and value elements. Data selects the keys.
fn head_space(
    tokens: &Size,
    kv_heads: u32,
    group: usize,
    key: usize,
    value: usize,
) -> [(&'static str, super::DimensionKind, Size); 5] {
    [
        ("rows", Parallel, tokens.clone()),
        ("kv_heads", Parallel, (kv_heads as usize).into()),
        ("group", Parallel, group.into()),
        ("key", Reduced, key.into()),
        ("value", Parallel, value.into()),
    ]
}
