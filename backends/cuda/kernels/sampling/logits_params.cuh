/*
 * Parameters of the kernels in sampling/logits.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `logit_process`. */
struct LogitProcessParams {
    Extent extent;
    i64 vocabulary;
    /* The number of requests that have settings. */
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
static_assert(sizeof(LogitProcessParams::extent) == 72 && alignof(decltype(LogitProcessParams::extent)) == 8, "LogitProcessParams as in Rust");
static_assert(sizeof(LogitProcessParams::vocabulary) == 8 && alignof(decltype(LogitProcessParams::vocabulary)) == 8, "LogitProcessParams as in Rust");
static_assert(sizeof(LogitProcessParams::capacity) == 8 && alignof(decltype(LogitProcessParams::capacity)) == 8, "LogitProcessParams as in Rust");
static_assert(sizeof(LogitProcessParams::logits) == 16 && alignof(decltype(LogitProcessParams::logits)) == 8, "LogitProcessParams as in Rust");
static_assert(sizeof(LogitProcessParams::requests) == 8 && alignof(decltype(LogitProcessParams::requests)) == 8, "LogitProcessParams as in Rust");
static_assert(sizeof(LogitProcessParams::settings) == 16 && alignof(decltype(LogitProcessParams::settings)) == 8, "LogitProcessParams as in Rust");
static_assert(sizeof(LogitProcessParams::counts) == 16 && alignof(decltype(LogitProcessParams::counts)) == 8, "LogitProcessParams as in Rust");
static_assert(sizeof(LogitProcessParams::bias) == 16 && alignof(decltype(LogitProcessParams::bias)) == 8, "LogitProcessParams as in Rust");
static_assert(sizeof(LogitProcessParams::mask) == 16 && alignof(decltype(LogitProcessParams::mask)) == 8, "LogitProcessParams as in Rust");
static_assert(sizeof(LogitProcessParams::y) == 16 && alignof(decltype(LogitProcessParams::y)) == 8, "LogitProcessParams as in Rust");
