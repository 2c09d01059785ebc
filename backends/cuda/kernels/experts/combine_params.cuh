/*
 * Parameters of the kernels in experts/combine.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `moe_combine` and `moe_combine_wide`. */
struct MoeCombineParams {
    Extent extent;
    Matrix<const X> x;
    Matrix<const float> weights;
    Matrix<const int> experts;
    Matrix<X> y;
    /* Columns of the result. */
    i64 columns;
    /* Experts of the device, and the index of the first. */
    i64 count;
    i64 first_expert;
};
static_assert(sizeof(MoeCombineParams) == 160, "MoeCombineParams as in Rust");
static_assert(sizeof(MoeCombineParams::extent) == 72 && alignof(decltype(MoeCombineParams::extent)) == 8, "MoeCombineParams as in Rust");
static_assert(sizeof(MoeCombineParams::x) == 16 && alignof(decltype(MoeCombineParams::x)) == 8, "MoeCombineParams as in Rust");
static_assert(sizeof(MoeCombineParams::weights) == 16 && alignof(decltype(MoeCombineParams::weights)) == 8, "MoeCombineParams as in Rust");
static_assert(sizeof(MoeCombineParams::experts) == 16 && alignof(decltype(MoeCombineParams::experts)) == 8, "MoeCombineParams as in Rust");
static_assert(sizeof(MoeCombineParams::y) == 16 && alignof(decltype(MoeCombineParams::y)) == 8, "MoeCombineParams as in Rust");
static_assert(sizeof(MoeCombineParams::columns) == 8 && alignof(decltype(MoeCombineParams::columns)) == 8, "MoeCombineParams as in Rust");
static_assert(sizeof(MoeCombineParams::count) == 8 && alignof(decltype(MoeCombineParams::count)) == 8, "MoeCombineParams as in Rust");
static_assert(sizeof(MoeCombineParams::first_expert) == 8 && alignof(decltype(MoeCombineParams::first_expert)) == 8, "MoeCombineParams as in Rust");
