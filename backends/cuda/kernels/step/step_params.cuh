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
    /* The most tokens that each sequence brings. */
    const int* lengths;
    /* Where the tokens of each sequence begin in `prompt`, or -1 for its last token. */
    const int* sources;
    const int* prompt;
    /* Rows of the step whose logits are wanted. */
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
static_assert(__builtin_offsetof(PrepareStepParams, sequence_extent) == 0, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, token_extent) == 72, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, row_extent) == 144, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, request_extent) == 216, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, prompt_tokens) == 288, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, blocks) == 296, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, vocabulary) == 304, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, block_size) == 312, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, requests) == 320, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, lengths) == 328, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, sources) == 336, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, prompt) == 344, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, wanted) == 352, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, table) == 360, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, last_token) == 376, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, finished) == 384, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, ids) == 392, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, positions) == 400, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, slots) == 408, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, query_start) == 416, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, query_length) == 424, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, kv_length) == 432, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, tables) == 440, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, row_positions) == 456, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, length) == 464, "PrepareStepParams as in Rust");
static_assert(__builtin_offsetof(PrepareStepParams, counts) == 472, "PrepareStepParams as in Rust");

/* Parameters of `commit_tokens`. */
struct CommitTokensParams {
    Extent extent;
    const int* requests;
    const int* ids;
    TokenRecords records;
};
static_assert(sizeof(CommitTokensParams) == 216, "CommitTokensParams as in Rust");
static_assert(__builtin_offsetof(CommitTokensParams, extent) == 0, "CommitTokensParams as in Rust");
static_assert(__builtin_offsetof(CommitTokensParams, requests) == 72, "CommitTokensParams as in Rust");
static_assert(__builtin_offsetof(CommitTokensParams, ids) == 80, "CommitTokensParams as in Rust");
static_assert(__builtin_offsetof(CommitTokensParams, records) == 88, "CommitTokensParams as in Rust");
