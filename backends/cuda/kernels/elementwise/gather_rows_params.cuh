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
static_assert(__builtin_offsetof(GatherRowsParams, extent) == 0, "GatherRowsParams as in Rust");
static_assert(__builtin_offsetof(GatherRowsParams, source) == 72, "GatherRowsParams as in Rust");
static_assert(__builtin_offsetof(GatherRowsParams, x) == 144, "GatherRowsParams as in Rust");
static_assert(__builtin_offsetof(GatherRowsParams, index) == 160, "GatherRowsParams as in Rust");
static_assert(__builtin_offsetof(GatherRowsParams, y) == 168, "GatherRowsParams as in Rust");
static_assert(__builtin_offsetof(GatherRowsParams, columns) == 184, "GatherRowsParams as in Rust");
