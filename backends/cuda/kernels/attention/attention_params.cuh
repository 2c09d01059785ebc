/*
 * Parameters of the kernels in attention/attention.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `attention`. */
struct PlainAttentionParams {
    AttentionParams attention;
    /* The most splits of a sequence's keys. */
    i64 splits;
    /* Unnormalised results of splits. */
    float* partial;
    /* How many splits of each tile are done. */
    u32* counters;
};
static_assert(sizeof(PlainAttentionParams) == 424, "PlainAttentionParams as in Rust");
static_assert(__builtin_offsetof(PlainAttentionParams, attention) == 0, "PlainAttentionParams as in Rust");
static_assert(__builtin_offsetof(PlainAttentionParams, splits) == 400, "PlainAttentionParams as in Rust");
static_assert(__builtin_offsetof(PlainAttentionParams, partial) == 408, "PlainAttentionParams as in Rust");
static_assert(__builtin_offsetof(PlainAttentionParams, counters) == 416, "PlainAttentionParams as in Rust");
