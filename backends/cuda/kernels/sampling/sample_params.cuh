/*
 * Parameters of the kernels in sampling/sample.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `sample_chunks` and `sample`. */
struct SampleParams {
    Extent extent;
    i64 columns;
    /* The number of requests that have settings and a seed. */
    i64 capacity;
    Matrix<const float> logits;
    const int* requests;
    const int* positions;
    Matrix<const float> settings;
    Matrix<const u32> seeds;
    /* The summary of each chunk of each row. */
    Share* shares;
    /* Chunks of a row. */
    i64 chunks;
    int* ids;
    float* log_probability;
};
static_assert(sizeof(SampleParams) == 184, "SampleParams as in Rust");
static_assert(sizeof(SampleParams::extent) == 72 && alignof(decltype(SampleParams::extent)) == 8, "SampleParams as in Rust");
static_assert(sizeof(SampleParams::columns) == 8 && alignof(decltype(SampleParams::columns)) == 8, "SampleParams as in Rust");
static_assert(sizeof(SampleParams::capacity) == 8 && alignof(decltype(SampleParams::capacity)) == 8, "SampleParams as in Rust");
static_assert(sizeof(SampleParams::logits) == 16 && alignof(decltype(SampleParams::logits)) == 8, "SampleParams as in Rust");
static_assert(sizeof(SampleParams::requests) == 8 && alignof(decltype(SampleParams::requests)) == 8, "SampleParams as in Rust");
static_assert(sizeof(SampleParams::positions) == 8 && alignof(decltype(SampleParams::positions)) == 8, "SampleParams as in Rust");
static_assert(sizeof(SampleParams::settings) == 16 && alignof(decltype(SampleParams::settings)) == 8, "SampleParams as in Rust");
static_assert(sizeof(SampleParams::seeds) == 16 && alignof(decltype(SampleParams::seeds)) == 8, "SampleParams as in Rust");
static_assert(sizeof(SampleParams::shares) == 8 && alignof(decltype(SampleParams::shares)) == 8, "SampleParams as in Rust");
static_assert(sizeof(SampleParams::chunks) == 8 && alignof(decltype(SampleParams::chunks)) == 8, "SampleParams as in Rust");
static_assert(sizeof(SampleParams::ids) == 8 && alignof(decltype(SampleParams::ids)) == 8, "SampleParams as in Rust");
static_assert(sizeof(SampleParams::log_probability) == 8 && alignof(decltype(SampleParams::log_probability)) == 8, "SampleParams as in Rust");
