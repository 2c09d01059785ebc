/*
 * The struct that all kernels for attention take.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Operands, results and attributes of attention, which all its kernels take. */
struct AttentionParams {
    Extent sequences;
    Extent tokens;
    Matrix<const Q> query;
    const K* keys;
    Strides key_strides;
    const K* values;
    Strides value_strides;
    const int* query_start;
    const int* query_length;
    const int* kv_length;
    /* The block table; absent without pages. */
    Matrix<const int> table;
    i64 table_columns;
    i64 pages;
    /* Slots of a page. */
    i64 slots;
    /* A slope for each query head; may be null. */
    const float* alibi;
    /* A logit for each query head; may be null. */
    const float* sinks;
    /* Bits of an explicit mask, in words; may be absent. */
    Matrix<const u32> mask;
    i64 mask_columns;
    i64 kv_heads;
    /* Query heads of a KV head. */
    i64 group;
    /* Tiles that share the query heads of a KV head. */
    i64 parts;
    i64 window;
    Matrix<Q> y;
    /* May be absent. */
    Matrix<float> log_sum_exp;
    float scale;
    float softcap;
};
static_assert(sizeof(AttentionParams) == 400, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, sequences) == 0, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, tokens) == 72, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, query) == 144, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, keys) == 160, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, key_strides) == 168, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, values) == 192, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, value_strides) == 200, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, query_start) == 224, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, query_length) == 232, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, kv_length) == 240, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, table) == 248, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, table_columns) == 264, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, pages) == 272, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, slots) == 280, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, alibi) == 288, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, sinks) == 296, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, mask) == 304, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, mask_columns) == 320, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, kv_heads) == 328, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, group) == 336, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, parts) == 344, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, window) == 352, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, y) == 360, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, log_sum_exp) == 376, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, scale) == 392, "AttentionParams as in Rust");
static_assert(__builtin_offsetof(AttentionParams, softcap) == 396, "AttentionParams as in Rust");
