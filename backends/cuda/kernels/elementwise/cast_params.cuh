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
static_assert(sizeof(CastParams::extent) == 72 && alignof(decltype(CastParams::extent)) == 8, "CastParams as in Rust");
static_assert(sizeof(CastParams::x) == 16 && alignof(decltype(CastParams::x)) == 8, "CastParams as in Rust");
static_assert(sizeof(CastParams::y) == 16 && alignof(decltype(CastParams::y)) == 8, "CastParams as in Rust");
static_assert(sizeof(CastParams::columns) == 8 && alignof(decltype(CastParams::columns)) == 8, "CastParams as in Rust");
