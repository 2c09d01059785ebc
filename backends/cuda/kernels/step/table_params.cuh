/*
 * What kernels record of tokens in the request table.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* What the request table records of tokens. */
struct TokenRecords {
    Extent requests;
    int* last_token;
    int* finished;
    /* How often each token was generated, and whether it is in the prompt. */
    Matrix<int> counts;
    i64 vocabulary;
    /* Tokens that finish a request. */
    const int* stop_ids;
    i64 stops;
};
static_assert(sizeof(TokenRecords) == 128, "TokenRecords as in Rust");
static_assert(__builtin_offsetof(TokenRecords, requests) == 0, "TokenRecords as in Rust");
static_assert(__builtin_offsetof(TokenRecords, last_token) == 72, "TokenRecords as in Rust");
static_assert(__builtin_offsetof(TokenRecords, finished) == 80, "TokenRecords as in Rust");
static_assert(__builtin_offsetof(TokenRecords, counts) == 88, "TokenRecords as in Rust");
static_assert(__builtin_offsetof(TokenRecords, vocabulary) == 104, "TokenRecords as in Rust");
static_assert(__builtin_offsetof(TokenRecords, stop_ids) == 112, "TokenRecords as in Rust");
static_assert(__builtin_offsetof(TokenRecords, stops) == 120, "TokenRecords as in Rust");
