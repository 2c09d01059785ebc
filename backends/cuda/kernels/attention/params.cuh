/*
 * The parameter struct of all attention kernels.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Operands, results and attributes that all attention kernels take. */
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
    /* Tiles per group of query heads of a KV head. */
    i64 parts;
    i64 window;
    Matrix<Q> y;
    /* May be absent. */
    Matrix<float> log_sum_exp;
    float scale;
    float softcap;
};
static_assert(sizeof(AttentionParams) == 400, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::sequences) == 72 && alignof(decltype(AttentionParams::sequences)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::tokens) == 72 && alignof(decltype(AttentionParams::tokens)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::query) == 16 && alignof(decltype(AttentionParams::query)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::keys) == 8 && alignof(decltype(AttentionParams::keys)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::key_strides) == 24 && alignof(decltype(AttentionParams::key_strides)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::values) == 8 && alignof(decltype(AttentionParams::values)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::value_strides) == 24 && alignof(decltype(AttentionParams::value_strides)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::query_start) == 8 && alignof(decltype(AttentionParams::query_start)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::query_length) == 8 && alignof(decltype(AttentionParams::query_length)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::kv_length) == 8 && alignof(decltype(AttentionParams::kv_length)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::table) == 16 && alignof(decltype(AttentionParams::table)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::table_columns) == 8 && alignof(decltype(AttentionParams::table_columns)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::pages) == 8 && alignof(decltype(AttentionParams::pages)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::slots) == 8 && alignof(decltype(AttentionParams::slots)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::alibi) == 8 && alignof(decltype(AttentionParams::alibi)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::sinks) == 8 && alignof(decltype(AttentionParams::sinks)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::mask) == 16 && alignof(decltype(AttentionParams::mask)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::mask_columns) == 8 && alignof(decltype(AttentionParams::mask_columns)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::kv_heads) == 8 && alignof(decltype(AttentionParams::kv_heads)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::group) == 8 && alignof(decltype(AttentionParams::group)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::parts) == 8 && alignof(decltype(AttentionParams::parts)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::window) == 8 && alignof(decltype(AttentionParams::window)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::y) == 16 && alignof(decltype(AttentionParams::y)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::log_sum_exp) == 16 && alignof(decltype(AttentionParams::log_sum_exp)) == 8, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::scale) == 4 && alignof(decltype(AttentionParams::scale)) == 4, "AttentionParams as in Rust");
static_assert(sizeof(AttentionParams::softcap) == 4 && alignof(decltype(AttentionParams::softcap)) == 4, "AttentionParams as in Rust");
