/*
 * Parameters of the kernels in attention/decode_even.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `decode_even`. */
struct DecodeEvenParams {
    AttentionParams attention;
    /* KV heads times parts of their groups. */
    i64 columns;
    /* Unnormalised parts of tiles, two for each warp. */
    float* partial;
    /* How many warps of each shared tile are done. */
    u32* counters;
};
static_assert(sizeof(DecodeEvenParams) == 424, "DecodeEvenParams as in Rust");
static_assert(__builtin_offsetof(DecodeEvenParams, attention) == 0, "DecodeEvenParams as in Rust");
static_assert(__builtin_offsetof(DecodeEvenParams, columns) == 400, "DecodeEvenParams as in Rust");
static_assert(__builtin_offsetof(DecodeEvenParams, partial) == 408, "DecodeEvenParams as in Rust");
static_assert(__builtin_offsetof(DecodeEvenParams, counters) == 416, "DecodeEvenParams as in Rust");
