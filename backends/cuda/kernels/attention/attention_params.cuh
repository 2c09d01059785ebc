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
};
static_assert(sizeof(PlainAttentionParams) == 424, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::attention) == 400 && alignof(decltype(PlainAttentionParams::attention)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::splits) == 8 && alignof(decltype(PlainAttentionParams::splits)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::partial) == 8 && alignof(decltype(PlainAttentionParams::partial)) == 8, "PlainAttentionParams as in Rust");
static_assert(sizeof(PlainAttentionParams::counters) == 8 && alignof(decltype(PlainAttentionParams::counters)) == 8, "PlainAttentionParams as in Rust");
