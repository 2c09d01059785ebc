/*
 * Parameters of the kernels in sampling/logits.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `logit_process`. */
struct LogitProcessParams {
    Extent extent;
    i64 vocabulary;
    /* Requests that have settings. */
    i64 capacity;
    Matrix<const X> logits;
    const int* requests;
    Matrix<const float> settings;
    Matrix<const int> counts;
    /* A row for each request; may be absent. */
    Matrix<const float> bias;
    /* Bits of the allowed tokens, in words; may be absent. */
    Matrix<const u32> mask;
    Matrix<float> y;
};
static_assert(sizeof(LogitProcessParams) == 192, "LogitProcessParams as in Rust");
static_assert(__builtin_offsetof(LogitProcessParams, extent) == 0, "LogitProcessParams as in Rust");
static_assert(__builtin_offsetof(LogitProcessParams, vocabulary) == 72, "LogitProcessParams as in Rust");
static_assert(__builtin_offsetof(LogitProcessParams, capacity) == 80, "LogitProcessParams as in Rust");
static_assert(__builtin_offsetof(LogitProcessParams, logits) == 88, "LogitProcessParams as in Rust");
static_assert(__builtin_offsetof(LogitProcessParams, requests) == 104, "LogitProcessParams as in Rust");
static_assert(__builtin_offsetof(LogitProcessParams, settings) == 112, "LogitProcessParams as in Rust");
static_assert(__builtin_offsetof(LogitProcessParams, counts) == 128, "LogitProcessParams as in Rust");
static_assert(__builtin_offsetof(LogitProcessParams, bias) == 144, "LogitProcessParams as in Rust");
static_assert(__builtin_offsetof(LogitProcessParams, mask) == 160, "LogitProcessParams as in Rust");
static_assert(__builtin_offsetof(LogitProcessParams, y) == 176, "LogitProcessParams as in Rust");
