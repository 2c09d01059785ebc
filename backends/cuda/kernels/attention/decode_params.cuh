/*
 * Parameters of the kernels in attention/decode.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Where rows go as bytes; nulls if they are not quantised. */
struct QuantisedRows {
    Matrix<signed char> y;
    float* scales;
    /* How many blocks of each row are done. */
    u32* counters;
};
static_assert(sizeof(QuantisedRows) == 32, "QuantisedRows as in Rust");
static_assert(__builtin_offsetof(QuantisedRows, y) == 0, "QuantisedRows as in Rust");
static_assert(__builtin_offsetof(QuantisedRows, scales) == 16, "QuantisedRows as in Rust");
static_assert(__builtin_offsetof(QuantisedRows, counters) == 24, "QuantisedRows as in Rust");

/* Parameters of `decode`. */
struct DecodeParams {
    AttentionParams attention;
    /* The most splits of a sequence's keys. */
    i64 splits;
    /* Unnormalised results of clusters of splits. */
    float* partial;
    /* How many clusters of each tile are done. */
    u32* counters;
    QuantisedRows quantised;
};
static_assert(sizeof(DecodeParams) == 456, "DecodeParams as in Rust");
static_assert(__builtin_offsetof(DecodeParams, attention) == 0, "DecodeParams as in Rust");
static_assert(__builtin_offsetof(DecodeParams, splits) == 400, "DecodeParams as in Rust");
static_assert(__builtin_offsetof(DecodeParams, partial) == 408, "DecodeParams as in Rust");
static_assert(__builtin_offsetof(DecodeParams, counters) == 416, "DecodeParams as in Rust");
static_assert(__builtin_offsetof(DecodeParams, quantised) == 424, "DecodeParams as in Rust");
