/*
 * Parameters of the kernels in sampling/argmax.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `argmax`. */
struct ArgmaxParams {
    Extent extent;
    i64 columns;
    Matrix<const X> x;
    int* ids;
    /* The best of each split of each row; null without splits. */
    struct Best* partial;
    /* The number of finished splits of each row; null without splits. */
    u32* counters;
};
static_assert(sizeof(ArgmaxParams) == 120, "ArgmaxParams as in Rust");
static_assert(sizeof(ArgmaxParams::extent) == 72 && alignof(decltype(ArgmaxParams::extent)) == 8, "ArgmaxParams as in Rust");
static_assert(sizeof(ArgmaxParams::columns) == 8 && alignof(decltype(ArgmaxParams::columns)) == 8, "ArgmaxParams as in Rust");
static_assert(sizeof(ArgmaxParams::x) == 16 && alignof(decltype(ArgmaxParams::x)) == 8, "ArgmaxParams as in Rust");
static_assert(sizeof(ArgmaxParams::ids) == 8 && alignof(decltype(ArgmaxParams::ids)) == 8, "ArgmaxParams as in Rust");
static_assert(sizeof(ArgmaxParams::partial) == 8 && alignof(decltype(ArgmaxParams::partial)) == 8, "ArgmaxParams as in Rust");
static_assert(sizeof(ArgmaxParams::counters) == 8 && alignof(decltype(ArgmaxParams::counters)) == 8, "ArgmaxParams as in Rust");
