/*
 * Parameters of the kernels in attention/decode_even.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `decode_even`. */
struct DecodeEvenParams {
    AttentionParams attention;
    /* KV heads times tiles per head group. */
    i64 columns;
    /* Partial results of tiles, two for each warp. */
    float* partial;
    /* The number of finished warps of each shared tile. */
    u32* counters;
};
static_assert(sizeof(DecodeEvenParams) == 424, "DecodeEvenParams as in Rust");
static_assert(sizeof(DecodeEvenParams::attention) == 400 && alignof(decltype(DecodeEvenParams::attention)) == 8, "DecodeEvenParams as in Rust");
static_assert(sizeof(DecodeEvenParams::columns) == 8 && alignof(decltype(DecodeEvenParams::columns)) == 8, "DecodeEvenParams as in Rust");
static_assert(sizeof(DecodeEvenParams::partial) == 8 && alignof(decltype(DecodeEvenParams::partial)) == 8, "DecodeEvenParams as in Rust");
static_assert(sizeof(DecodeEvenParams::counters) == 8 && alignof(decltype(DecodeEvenParams::counters)) == 8, "DecodeEvenParams as in Rust");
