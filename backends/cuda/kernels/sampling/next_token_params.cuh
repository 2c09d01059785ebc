/*
 * Parameters of the kernels in sampling/next_token.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `next_token`. */
struct NextTokenParams {
    Extent extent;
    i64 columns;
    /* Requests that have settings and a seed. */
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
    /* What was found in each chunk. */
    Share* shares;
    i64 chunks;
    int* ids;
    float* log_probability;
    /* The request whose token is recorded. */
    const int* commits;
    TokenRecords records;
    /* How many chunks are done. */
    u32* counter;
};
static_assert(sizeof(NextTokenParams) == 368, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, extent) == 0, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, columns) == 72, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, capacity) == 80, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, logits) == 88, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, requests) == 96, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, settings) == 104, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, counts) == 120, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, bias) == 136, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, mask) == 152, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, y) == 160, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, positions) == 168, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, seeds) == 176, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, shares) == 192, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, chunks) == 200, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, ids) == 208, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, log_probability) == 216, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, commits) == 224, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, records) == 232, "NextTokenParams as in Rust");
static_assert(__builtin_offsetof(NextTokenParams, counter) == 360, "NextTokenParams as in Rust");
