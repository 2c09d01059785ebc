/*
 * Parameters of the kernels in elementwise/add.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `add` and `add_wide`. */
struct AddParams {
    Extent extent;
    Matrix<const X> a;
    Matrix<const X> b;
    /* May be absent. */
    Matrix<const X> c;
    /* May be null. */
    const BIAS* bias;
    Matrix<X> y;
    i64 columns;
    float alpha;
};
static_assert(sizeof(AddParams) == 160, "AddParams as in Rust");
static_assert(__builtin_offsetof(AddParams, extent) == 0, "AddParams as in Rust");
static_assert(__builtin_offsetof(AddParams, a) == 72, "AddParams as in Rust");
static_assert(__builtin_offsetof(AddParams, b) == 88, "AddParams as in Rust");
static_assert(__builtin_offsetof(AddParams, c) == 104, "AddParams as in Rust");
static_assert(__builtin_offsetof(AddParams, bias) == 120, "AddParams as in Rust");
static_assert(__builtin_offsetof(AddParams, y) == 128, "AddParams as in Rust");
static_assert(__builtin_offsetof(AddParams, columns) == 144, "AddParams as in Rust");
static_assert(__builtin_offsetof(AddParams, alpha) == 152, "AddParams as in Rust");
