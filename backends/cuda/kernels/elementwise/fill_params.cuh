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
static_assert(__builtin_offsetof(FillParams, extent) == 0, "FillParams as in Rust");
static_assert(__builtin_offsetof(FillParams, x) == 72, "FillParams as in Rust");
static_assert(__builtin_offsetof(FillParams, columns) == 88, "FillParams as in Rust");
static_assert(__builtin_offsetof(FillParams, bits) == 96, "FillParams as in Rust");
