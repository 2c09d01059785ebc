/*
 * Parameters of the kernels in sampling/sample.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `sample_chunks` and `sample`. */
struct SampleParams {
    Extent extent;
    i64 columns;
    /* Requests that have settings and a seed. */
    i64 capacity;
    Matrix<const float> logits;
    const int* requests;
    const int* positions;
    Matrix<const float> settings;
    Matrix<const u32> seeds;
    /* What was found in each chunk of each row. */
    Share* shares;
    /* Chunks of a row. */
    i64 chunks;
    int* ids;
    float* log_probability;
};
static_assert(sizeof(SampleParams) == 184, "SampleParams as in Rust");
static_assert(__builtin_offsetof(SampleParams, extent) == 0, "SampleParams as in Rust");
static_assert(__builtin_offsetof(SampleParams, columns) == 72, "SampleParams as in Rust");
static_assert(__builtin_offsetof(SampleParams, capacity) == 80, "SampleParams as in Rust");
static_assert(__builtin_offsetof(SampleParams, logits) == 88, "SampleParams as in Rust");
static_assert(__builtin_offsetof(SampleParams, requests) == 104, "SampleParams as in Rust");
static_assert(__builtin_offsetof(SampleParams, positions) == 112, "SampleParams as in Rust");
static_assert(__builtin_offsetof(SampleParams, settings) == 120, "SampleParams as in Rust");
static_assert(__builtin_offsetof(SampleParams, seeds) == 136, "SampleParams as in Rust");
static_assert(__builtin_offsetof(SampleParams, shares) == 152, "SampleParams as in Rust");
static_assert(__builtin_offsetof(SampleParams, chunks) == 160, "SampleParams as in Rust");
static_assert(__builtin_offsetof(SampleParams, ids) == 168, "SampleParams as in Rust");
static_assert(__builtin_offsetof(SampleParams, log_probability) == 176, "SampleParams as in Rust");
