/*
 * Parameters of the kernels in elementwise/cast.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `cast`. */
struct CastParams {
    Extent extent;
    Matrix<const X> x;
    Matrix<Y> y;
    i64 columns;
};
static_assert(sizeof(CastParams) == 112, "CastParams as in Rust");
static_assert(__builtin_offsetof(CastParams, extent) == 0, "CastParams as in Rust");
static_assert(__builtin_offsetof(CastParams, x) == 72, "CastParams as in Rust");
static_assert(__builtin_offsetof(CastParams, y) == 88, "CastParams as in Rust");
static_assert(__builtin_offsetof(CastParams, columns) == 104, "CastParams as in Rust");
