/*
 * Parameters of the kernels in elementwise/embed.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `embed`. */
struct EmbedParams {
    Extent extent;
    Matrix<X> y;
    i64 columns;
    const int* ids;
    /* The id of the first row of the table. */
    i64 first_row;
    Weight table;
    i64 table_rows;
    /* Null without a table of positions. */
    const int* positions;
    /* The row of position 0. */
    i64 position_offset;
    OtherWeight position_table;
    i64 position_table_rows;
};
static_assert(sizeof(EmbedParams) == 208, "EmbedParams as in Rust");
static_assert(__builtin_offsetof(EmbedParams, extent) == 0, "EmbedParams as in Rust");
static_assert(__builtin_offsetof(EmbedParams, y) == 72, "EmbedParams as in Rust");
static_assert(__builtin_offsetof(EmbedParams, columns) == 88, "EmbedParams as in Rust");
static_assert(__builtin_offsetof(EmbedParams, ids) == 96, "EmbedParams as in Rust");
static_assert(__builtin_offsetof(EmbedParams, first_row) == 104, "EmbedParams as in Rust");
static_assert(__builtin_offsetof(EmbedParams, table) == 112, "EmbedParams as in Rust");
static_assert(__builtin_offsetof(EmbedParams, table_rows) == 144, "EmbedParams as in Rust");
static_assert(__builtin_offsetof(EmbedParams, positions) == 152, "EmbedParams as in Rust");
static_assert(__builtin_offsetof(EmbedParams, position_offset) == 160, "EmbedParams as in Rust");
static_assert(__builtin_offsetof(EmbedParams, position_table) == 168, "EmbedParams as in Rust");
static_assert(__builtin_offsetof(EmbedParams, position_table_rows) == 200, "EmbedParams as in Rust");
