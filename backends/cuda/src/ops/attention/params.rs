//! Parameter structs of the attention kernels.

use crate::{
    driver::{
        kernel_struct::{Pointer, declaration, header, kernel_struct, params_header},
        tensor_map::TensorMap,
    },
    ops::{
        bound::Bound,
        frame::Frame,
        params::{ExtentParams, MatrixParams, Strides},
    },
};
use dsrun_core::{
    Result,
    op::{Attention, PagedAttention},
};

kernel_struct! {
    /// Operands, results and attributes that all attention kernels take.
    pub(super) struct AttentionParams {
        pub(super) sequences: ExtentParams = "Extent",
        pub(super) tokens: ExtentParams = "Extent",
        pub(super) query: MatrixParams = "Matrix<const Q>",
        pub(super) keys: Pointer = "const K*",
        pub(super) key_strides: Strides = "Strides",
        pub(super) values: Pointer = "const K*",
        pub(super) value_strides: Strides = "Strides",
        pub(super) query_start: Pointer = "const int*",
        pub(super) query_length: Pointer = "const int*",
        pub(super) kv_length: Pointer = "const int*",
        /// The block table; absent without pages.
        pub(super) table: MatrixParams = "Matrix<const int>",
        pub(super) table_columns: i64 = "i64",
        pub(super) pages: i64 = "i64",
        /// Slots of a page.
        pub(super) slots: i64 = "i64",
        /// A slope for each query head; may be null.
        pub(super) alibi: Pointer = "const float*",
        /// A logit for each query head; may be null.
        pub(super) sinks: Pointer = "const float*",
        /// Bits of an explicit mask, in words; may be absent.
        pub(super) mask: MatrixParams = "Matrix<const u32>",
        pub(super) mask_columns: i64 = "i64",
        pub(super) kv_heads: i64 = "i64",
        /// Query heads of a KV head.
        pub(super) group: i64 = "i64",
        /// Tiles per group of query heads of a KV head.
        pub(super) parts: i64 = "i64",
        pub(super) window: i64 = "i64",
        pub(super) y: MatrixParams = "Matrix<Q>",
        /// May be absent.
        pub(super) log_sum_exp: MatrixParams = "Matrix<float>",
        pub(super) scale: f32 = "float",
        pub(super) softcap: f32 = "float",
    }
}

kernel_struct! {
    /// Parameters of `attention`.
    pub(super) struct PlainAttentionParams {
        pub(super) attention: AttentionParams = "AttentionParams",
        /// The maximum number of splits of a sequence's keys.
        pub(super) splits: i64 = "i64",
        /// Unnormalised results of splits.
        pub(super) partial: Pointer = "float*",
        /// The number of finished splits of each tile.
        pub(super) counters: Pointer = "u32*",
        /// Query heads and queries of a tile.
        pub(super) heads: i64 = "i64",
        pub(super) tile_tokens: i64 = "i64",
        pub(super) key_size: i64 = "i64",
        pub(super) value_size: i64 = "i64",
        /// Sequences of fewer queries, and of at least `prompt`, are left to other kernels; `prompt` may be 0 for none.
        pub(super) fewest: i64 = "i64",
        pub(super) prompt: i64 = "i64",
        /// 1 causal, 2 bidirectional, 3 explicit.
        pub(super) mask: i64 = "i64",
        /// Whether keys and values are in pages; otherwise they are rows like queries.
        pub(super) paged: i64 = "i64",
    }
}

kernel_struct! {
    /// The quantised rows and their scales; null if rows are not quantised.
    pub(super) struct QuantisedRows {
        pub(super) y: MatrixParams = "Matrix<signed char>",
        pub(super) scales: Pointer = "float*",
        /// The number of finished blocks of each row.
        pub(super) counters: Pointer = "u32*",
    }
}

kernel_struct! {
    /// Parameters of `decode`.
    pub(super) struct DecodeParams {
        pub(super) attention: AttentionParams = "AttentionParams",
        /// The maximum number of splits of a sequence's keys.
        pub(super) splits: i64 = "i64",
        /// Unnormalised results of clusters of splits.
        pub(super) partial: Pointer = "float*",
        /// The number of finished clusters of each tile.
        pub(super) counters: Pointer = "u32*",
        pub(super) quantised: QuantisedRows = "QuantisedRows",
    }
}

kernel_struct! {
    /// Parameters of `decode_even`.
    pub(super) struct DecodeEvenParams {
        pub(super) attention: AttentionParams = "AttentionParams",
        /// KV heads times tiles per head group.
        pub(super) columns: i64 = "i64",
        /// Partial results of tiles, two for each warp.
        pub(super) partial: Pointer = "float*",
        /// The number of finished warps of each shared tile.
        pub(super) counters: Pointer = "u32*",
    }
}

kernel_struct! {
    /// Parameters of `latent` and `latent_combine`.
    pub(super) struct LatentParams {
        pub(super) attention: AttentionParams = "AttentionParams",
        /// The maximum number of splits of a tile's keys.
        pub(super) splits: i64 = "i64",
        /// Unnormalised results of splits.
        pub(super) partial: Pointer = "float*",
    }
}

kernel_struct! {
    /// Parameters of `prompt_wgmma`.
    pub(super) struct PromptWgmmaParams {
        pub(super) query_map: TensorMap = "TensorMap",
        pub(super) key_map: TensorMap = "TensorMap",
        pub(super) value_map: TensorMap = "TensorMap",
        pub(super) attention: AttentionParams = "AttentionParams",
        /// The number of tiles that blocks have taken.
        pub(super) counter: Pointer = "u32*",
    }
}

/// The generated headers of these structs.
pub(in crate::ops) fn params_headers() -> Vec<(String, String)> {
    let about = "The parameter struct of all attention kernels.";
    vec![
        ("attention/params.cuh".to_owned(), header(about, &[declaration::<AttentionParams>()])),
        params_header("attention/attention", &[declaration::<PlainAttentionParams>()]),
        params_header("attention/decode", &[declaration::<QuantisedRows>(), declaration::<DecodeParams>()]),
        params_header("attention/decode_even", &[declaration::<DecodeEvenParams>()]),
        params_header("attention/latent", &[declaration::<LatentParams>()]),
        params_header("attention/prompt_wgmma", &[declaration::<PromptWgmmaParams>()]),
    ]
}

/// Query heads of a KV head.
fn group(query_heads: u32, kv_heads: u32) -> i64 {
    i64::from((query_heads / kv_heads.max(1)).max(1))
}

impl AttentionParams {
    /// Paged attention with one tile per KV head, written to `y` and, if needed, the log-sum-exp of the scores.
    pub(super) fn paged(op: &PagedAttention, frame: &Frame, y: &Bound, log: Option<&Bound>) -> Result<Self> {
        let (query, keys) = (frame.tensor(0)?, frame.tensor(1)?);
        let values = frame.optional(2).unwrap_or(keys);
        let (start, length, total) = (frame.tensor(3)?, frame.tensor(4)?, frame.tensor(5)?);
        let (table, mask) = (frame.tensor(6)?, frame.optional(10));
        let of_tokens: Vec<&Bound> = [query, y].into_iter().chain(log).chain(mask).collect();
        Ok(Self {
            sequences: ExtentParams::of(start.size(0), &[start, length, total, table]),
            tokens: ExtentParams::of(query.size(0), &of_tokens),
            query: MatrixParams::of(query),
            keys: keys.address,
            key_strides: Strides::of(keys),
            values: values.address,
            value_strides: Strides::of(values),
            query_start: start.address,
            query_length: length.address,
            kv_length: total.address,
            table: MatrixParams::of(table),
            table_columns: table.size(1) as i64,
            pages: keys.size(0) as i64,
            slots: keys.size(2) as i64,
            alibi: frame.address(8),
            sinks: frame.address(9),
            mask: MatrixParams::optional(mask),
            mask_columns: mask.map_or(0, |mask| mask.size(1) as i64),
            kv_heads: i64::from(op.kv_heads),
            group: group(op.query_heads, op.kv_heads),
            parts: 1,
            window: i64::from(op.window),
            y: MatrixParams::of(y),
            log_sum_exp: MatrixParams::optional(log),
            scale: op.scale,
            softcap: op.softcap,
        })
    }

    /// Unpaged attention, whose keys and values are rows, with one tile per KV head.
    pub(super) fn unpaged(op: &Attention, frame: &Frame) -> Result<Self> {
        let (query, keys, values) = (frame.tensor(0)?, frame.tensor(1)?, frame.tensor(2)?);
        let (start, length, y) = (frame.tensor(3)?, frame.tensor(4)?, frame.result(0)?);
        let strides = |rows: &Bound| Strides {
            page: 0,
            head: rows.size(1) as i64 / i64::from(op.kv_heads.max(1)),
            slot: rows.stride(0) as i64,
        };
        Ok(Self {
            sequences: ExtentParams::of(start.size(0), &[start, length]),
            tokens: ExtentParams::of(query.size(0), &[query, keys, values, y]),
            query: MatrixParams::of(query),
            keys: keys.address,
            key_strides: strides(keys),
            values: values.address,
            value_strides: strides(values),
            query_start: start.address,
            query_length: length.address,
            kv_length: length.address,
            pages: keys.size(0) as i64,
            slots: 1,
            alibi: frame.address(5),
            kv_heads: i64::from(op.kv_heads),
            group: group(op.query_heads, op.kv_heads),
            parts: 1,
            window: i64::from(op.window),
            y: MatrixParams::of(y),
            scale: op.scale,
            softcap: op.softcap,
            ..Self::default()
        })
    }
}
