/*
 * Parameters of the kernels in elementwise/fill.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `fill`. */
struct FillParams {
    Extent extent;
    Matrix<X> x;
    i64 columns;
    /* The bits of an element, in the low bytes. */
    u32 bits;
};
static_assert(sizeof(FillParams) == 104, "FillParams as in Rust");
static_assert(sizeof(FillParams::extent) == 72 && alignof(decltype(FillParams::extent)) == 8, "FillParams as in Rust");
static_assert(sizeof(FillParams::x) == 16 && alignof(decltype(FillParams::x)) == 8, "FillParams as in Rust");
static_assert(sizeof(FillParams::columns) == 8 && alignof(decltype(FillParams::columns)) == 8, "FillParams as in Rust");
static_assert(sizeof(FillParams::bits) == 4 && alignof(decltype(FillParams::bits)) == 4, "FillParams as in Rust");
