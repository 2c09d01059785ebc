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
static_assert(sizeof(AddParams::extent) == 72 && alignof(decltype(AddParams::extent)) == 8, "AddParams as in Rust");
static_assert(sizeof(AddParams::a) == 16 && alignof(decltype(AddParams::a)) == 8, "AddParams as in Rust");
static_assert(sizeof(AddParams::b) == 16 && alignof(decltype(AddParams::b)) == 8, "AddParams as in Rust");
static_assert(sizeof(AddParams::c) == 16 && alignof(decltype(AddParams::c)) == 8, "AddParams as in Rust");
static_assert(sizeof(AddParams::bias) == 8 && alignof(decltype(AddParams::bias)) == 8, "AddParams as in Rust");
static_assert(sizeof(AddParams::y) == 16 && alignof(decltype(AddParams::y)) == 8, "AddParams as in Rust");
static_assert(sizeof(AddParams::columns) == 8 && alignof(decltype(AddParams::columns)) == 8, "AddParams as in Rust");
static_assert(sizeof(AddParams::alpha) == 4 && alignof(decltype(AddParams::alpha)) == 4, "AddParams as in Rust");
