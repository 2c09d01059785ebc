/*
 * Parameters of the kernels in sampling/next_token.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `next_token`. */
struct NextTokenParams {
    Extent extent;
    i64 columns;
    /* The number of requests that have settings and a seed. */
    i64 capacity;
    const X* logits;
    const int* requests;
    Matrix<const float> settings;
    Matrix<const int> counts;
    /* A row for each request; may be absent. */
    Matrix<const float> bias;
    /* Bits of the allowed tokens, in words; may be null. */
    const u32* mask;
    /* The processed logits. */
    float* y;
    const int* positions;
    Matrix<const u32> seeds;
    /* The summary of each chunk. */
    Share* shares;
    i64 chunks;
    int* ids;
    float* log_probability;
    /* The request whose token is recorded. */
    const int* commits;
    TokenRecords records;
    /* The number of finished chunks. */
    u32* counter;
};
static_assert(sizeof(NextTokenParams) == 368, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::extent) == 72 && alignof(decltype(NextTokenParams::extent)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::columns) == 8 && alignof(decltype(NextTokenParams::columns)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::capacity) == 8 && alignof(decltype(NextTokenParams::capacity)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::logits) == 8 && alignof(decltype(NextTokenParams::logits)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::requests) == 8 && alignof(decltype(NextTokenParams::requests)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::settings) == 16 && alignof(decltype(NextTokenParams::settings)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::counts) == 16 && alignof(decltype(NextTokenParams::counts)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::bias) == 16 && alignof(decltype(NextTokenParams::bias)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::mask) == 8 && alignof(decltype(NextTokenParams::mask)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::y) == 8 && alignof(decltype(NextTokenParams::y)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::positions) == 8 && alignof(decltype(NextTokenParams::positions)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::seeds) == 16 && alignof(decltype(NextTokenParams::seeds)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::shares) == 8 && alignof(decltype(NextTokenParams::shares)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::chunks) == 8 && alignof(decltype(NextTokenParams::chunks)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::ids) == 8 && alignof(decltype(NextTokenParams::ids)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::log_probability) == 8 && alignof(decltype(NextTokenParams::log_probability)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::commits) == 8 && alignof(decltype(NextTokenParams::commits)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::records) == 128 && alignof(decltype(NextTokenParams::records)) == 8, "NextTokenParams as in Rust");
static_assert(sizeof(NextTokenParams::counter) == 8 && alignof(decltype(NextTokenParams::counter)) == 8, "NextTokenParams as in Rust");
