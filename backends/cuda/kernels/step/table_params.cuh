/*
 * The columns of the request table in which kernels record tokens.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* The columns of the request table that record tokens. */
struct TokenRecords {
    Extent requests;
    int* last_token;
    int* finished;
    /* The number of times each token was generated, and whether it is in the prompt. */
    Matrix<int> counts;
    i64 vocabulary;
    /* Tokens that finish a request. */
    const int* stop_ids;
    i64 stops;
};
static_assert(sizeof(TokenRecords) == 128, "TokenRecords as in Rust");
static_assert(sizeof(TokenRecords::requests) == 72 && alignof(decltype(TokenRecords::requests)) == 8, "TokenRecords as in Rust");
static_assert(sizeof(TokenRecords::last_token) == 8 && alignof(decltype(TokenRecords::last_token)) == 8, "TokenRecords as in Rust");
static_assert(sizeof(TokenRecords::finished) == 8 && alignof(decltype(TokenRecords::finished)) == 8, "TokenRecords as in Rust");
static_assert(sizeof(TokenRecords::counts) == 16 && alignof(decltype(TokenRecords::counts)) == 8, "TokenRecords as in Rust");
static_assert(sizeof(TokenRecords::vocabulary) == 8 && alignof(decltype(TokenRecords::vocabulary)) == 8, "TokenRecords as in Rust");
static_assert(sizeof(TokenRecords::stop_ids) == 8 && alignof(decltype(TokenRecords::stop_ids)) == 8, "TokenRecords as in Rust");
static_assert(sizeof(TokenRecords::stops) == 8 && alignof(decltype(TokenRecords::stops)) == 8, "TokenRecords as in Rust");
