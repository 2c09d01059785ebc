/*
 * Parameters of the kernels in elementwise/gather_rows.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `gather_rows`. */
struct GatherRowsParams {
    Extent extent;
    /* The rows of `x`. */
    Extent source;
    Matrix<const X> x;
    const int* index;
    Matrix<X> y;
    i64 columns;
};
static_assert(sizeof(GatherRowsParams) == 192, "GatherRowsParams as in Rust");
static_assert(sizeof(GatherRowsParams::extent) == 72 && alignof(decltype(GatherRowsParams::extent)) == 8, "GatherRowsParams as in Rust");
static_assert(sizeof(GatherRowsParams::source) == 72 && alignof(decltype(GatherRowsParams::source)) == 8, "GatherRowsParams as in Rust");
static_assert(sizeof(GatherRowsParams::x) == 16 && alignof(decltype(GatherRowsParams::x)) == 8, "GatherRowsParams as in Rust");
static_assert(sizeof(GatherRowsParams::index) == 8 && alignof(decltype(GatherRowsParams::index)) == 8, "GatherRowsParams as in Rust");
static_assert(sizeof(GatherRowsParams::y) == 16 && alignof(decltype(GatherRowsParams::y)) == 8, "GatherRowsParams as in Rust");
static_assert(sizeof(GatherRowsParams::columns) == 8 && alignof(decltype(GatherRowsParams::columns)) == 8, "GatherRowsParams as in Rust");
