/*
 * Parameters of the kernels in step/step.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `prepare_step`. */
struct PrepareStepParams {
    Extent sequence_extent;
    Extent token_extent;
    Extent row_extent;
    Extent request_extent;
    /* Tokens of `prompt`. */
    i64 prompt_tokens;
    /* Columns of `table`. */
    i64 blocks;
    i64 vocabulary;
    i64 block_size;
    /* The request of each sequence. */
    const int* requests;
    /* The number of tokens of each sequence, before it is bounded by the extent. */
    const int* lengths;
    /* Where the tokens of each sequence begin in `prompt`, or -1 for its last token. */
    const int* sources;
    const int* prompt;
    /* The rows of the step whose logits are needed. */
    const int* wanted;
    /* The block table of all requests. */
    Matrix<const int> table;
    const int* last_token;
    const int* finished;
    int* ids;
    int* positions;
    int* slots;
    int* query_start;
    int* query_length;
    int* kv_length;
    /* The block table of the sequences. */
    Matrix<int> tables;
    int* row_positions;
    /* Tokens of each request. */
    int* length;
    Matrix<int> counts;
};
static_assert(sizeof(PrepareStepParams) == 488, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::sequence_extent) == 72 && alignof(decltype(PrepareStepParams::sequence_extent)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::token_extent) == 72 && alignof(decltype(PrepareStepParams::token_extent)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::row_extent) == 72 && alignof(decltype(PrepareStepParams::row_extent)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::request_extent) == 72 && alignof(decltype(PrepareStepParams::request_extent)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::prompt_tokens) == 8 && alignof(decltype(PrepareStepParams::prompt_tokens)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::blocks) == 8 && alignof(decltype(PrepareStepParams::blocks)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::vocabulary) == 8 && alignof(decltype(PrepareStepParams::vocabulary)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::block_size) == 8 && alignof(decltype(PrepareStepParams::block_size)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::requests) == 8 && alignof(decltype(PrepareStepParams::requests)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::lengths) == 8 && alignof(decltype(PrepareStepParams::lengths)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::sources) == 8 && alignof(decltype(PrepareStepParams::sources)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::prompt) == 8 && alignof(decltype(PrepareStepParams::prompt)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::wanted) == 8 && alignof(decltype(PrepareStepParams::wanted)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::table) == 16 && alignof(decltype(PrepareStepParams::table)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::last_token) == 8 && alignof(decltype(PrepareStepParams::last_token)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::finished) == 8 && alignof(decltype(PrepareStepParams::finished)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::ids) == 8 && alignof(decltype(PrepareStepParams::ids)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::positions) == 8 && alignof(decltype(PrepareStepParams::positions)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::slots) == 8 && alignof(decltype(PrepareStepParams::slots)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::query_start) == 8 && alignof(decltype(PrepareStepParams::query_start)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::query_length) == 8 && alignof(decltype(PrepareStepParams::query_length)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::kv_length) == 8 && alignof(decltype(PrepareStepParams::kv_length)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::tables) == 16 && alignof(decltype(PrepareStepParams::tables)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::row_positions) == 8 && alignof(decltype(PrepareStepParams::row_positions)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::length) == 8 && alignof(decltype(PrepareStepParams::length)) == 8, "PrepareStepParams as in Rust");
static_assert(sizeof(PrepareStepParams::counts) == 16 && alignof(decltype(PrepareStepParams::counts)) == 8, "PrepareStepParams as in Rust");

/* Parameters of `commit_tokens`. */
struct CommitTokensParams {
    Extent extent;
    const int* requests;
    const int* ids;
    TokenRecords records;
};
static_assert(sizeof(CommitTokensParams) == 216, "CommitTokensParams as in Rust");
static_assert(sizeof(CommitTokensParams::extent) == 72 && alignof(decltype(CommitTokensParams::extent)) == 8, "CommitTokensParams as in Rust");
static_assert(sizeof(CommitTokensParams::requests) == 8 && alignof(decltype(CommitTokensParams::requests)) == 8, "CommitTokensParams as in Rust");
static_assert(sizeof(CommitTokensParams::ids) == 8 && alignof(decltype(CommitTokensParams::ids)) == 8, "CommitTokensParams as in Rust");
static_assert(sizeof(CommitTokensParams::records) == 128 && alignof(decltype(CommitTokensParams::records)) == 8, "CommitTokensParams as in Rust");
