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
static_assert(sizeof(EmbedParams::extent) == 72 && alignof(decltype(EmbedParams::extent)) == 8, "EmbedParams as in Rust");
static_assert(sizeof(EmbedParams::y) == 16 && alignof(decltype(EmbedParams::y)) == 8, "EmbedParams as in Rust");
static_assert(sizeof(EmbedParams::columns) == 8 && alignof(decltype(EmbedParams::columns)) == 8, "EmbedParams as in Rust");
static_assert(sizeof(EmbedParams::ids) == 8 && alignof(decltype(EmbedParams::ids)) == 8, "EmbedParams as in Rust");
static_assert(sizeof(EmbedParams::first_row) == 8 && alignof(decltype(EmbedParams::first_row)) == 8, "EmbedParams as in Rust");
static_assert(sizeof(EmbedParams::table) == 32 && alignof(decltype(EmbedParams::table)) == 8, "EmbedParams as in Rust");
static_assert(sizeof(EmbedParams::table_rows) == 8 && alignof(decltype(EmbedParams::table_rows)) == 8, "EmbedParams as in Rust");
static_assert(sizeof(EmbedParams::positions) == 8 && alignof(decltype(EmbedParams::positions)) == 8, "EmbedParams as in Rust");
static_assert(sizeof(EmbedParams::position_offset) == 8 && alignof(decltype(EmbedParams::position_offset)) == 8, "EmbedParams as in Rust");
static_assert(sizeof(EmbedParams::position_table) == 32 && alignof(decltype(EmbedParams::position_table)) == 8, "EmbedParams as in Rust");
static_assert(sizeof(EmbedParams::position_table_rows) == 8 && alignof(decltype(EmbedParams::position_table_rows)) == 8, "EmbedParams as in Rust");
