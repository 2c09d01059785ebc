/*
 * Parameters of the kernels in attention/attention.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `attention`. */
struct PlainAttentionParams {
    AttentionParams attention;
    /* The maximum number of splits of a sequence's keys. */
    i64 splits;
    /* Unnormalised results of splits. */
    float* partial;
    /* The number of finished splits of each tile. */
    u32* counters;
    /* Query heads and queries of a tile. */
    i64 heads;
    i64 tile_tokens;
    i64 key_size;
    i64 value_size;
    /* Sequences of fewer queries, and of at least `prompt`, are left to other kernels; `prompt` may be 0 for none. */
    i64 fewest;
    i64 prompt;
    /* 1 causal, 2 bidirectional, 3 explicit. */
    i64 mask;
    /* Whether keys and values are in pages; otherwise they are rows like queries. */
    i64 paged;
};
static_assert(sizeof(PlainAttentionParams) == 488, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::attention) == 400 && alignof(decltype(PlainAttentionParams::attention)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::splits) == 8 && alignof(decltype(PlainAttentionParams::splits)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::partial) == 8 && alignof(decltype(PlainAttentionParams::partial)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::counters) == 8 && alignof(decltype(PlainAttentionParams::counters)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::heads) == 8 && alignof(decltype(PlainAttentionParams::heads)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::tile_tokens) == 8 && alignof(decltype(PlainAttentionParams::tile_tokens)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::key_size) == 8 && alignof(decltype(PlainAttentionParams::key_size)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::value_size) == 8 && alignof(decltype(PlainAttentionParams::value_size)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::fewest) == 8 && alignof(decltype(PlainAttentionParams::fewest)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::prompt) == 8 && alignof(decltype(PlainAttentionParams::prompt)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::mask) == 8 && alignof(decltype(PlainAttentionParams::mask)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::paged) == 8 && alignof(decltype(PlainAttentionParams::paged)) == 8, "PlainAttentionParams as in Rust");
