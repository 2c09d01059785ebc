/*
 * Parameters of the kernels in attention/decode.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* The quantised rows and their scales; null if rows are not quantised. */
struct QuantisedRows {
    Matrix<signed char> y;
    float* scales;
    /* The number of finished blocks of each row. */
    u32* counters;
};
static_assert(sizeof(QuantisedRows) == 32, "QuantisedRows as in Rust");
static_assert(sizeof(QuantisedRows::y) == 16 && alignof(decltype(QuantisedRows::y)) == 8, "QuantisedRows as in Rust");
static_assert(sizeof(QuantisedRows::scales) == 8 && alignof(decltype(QuantisedRows::scales)) == 8, "QuantisedRows as in Rust");
static_assert(sizeof(QuantisedRows::counters) == 8 && alignof(decltype(QuantisedRows::counters)) == 8, "QuantisedRows as in Rust");

/* Parameters of `decode`. */
struct DecodeParams {
    AttentionParams attention;
    /* The maximum number of splits of a sequence's keys. */
    i64 splits;
    /* Unnormalised results of clusters of splits. */
    float* partial;
    /* The number of finished clusters of each tile. */
    u32* counters;
    QuantisedRows quantised;
};
static_assert(sizeof(DecodeParams) == 456, "DecodeParams as in Rust");
static_assert(sizeof(DecodeParams::attention) == 400 && alignof(decltype(DecodeParams::attention)) == 8, "DecodeParams as in Rust");
static_assert(sizeof(DecodeParams::splits) == 8 && alignof(decltype(DecodeParams::splits)) == 8, "DecodeParams as in Rust");
static_assert(sizeof(DecodeParams::partial) == 8 && alignof(decltype(DecodeParams::partial)) == 8, "DecodeParams as in Rust");
static_assert(sizeof(DecodeParams::counters) == 8 && alignof(decltype(DecodeParams::counters)) == 8, "DecodeParams as in Rust");
static_assert(sizeof(DecodeParams::quantised) == 32 && alignof(decltype(DecodeParams::quantised)) == 8, "DecodeParams as in Rust");
