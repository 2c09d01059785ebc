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
    /* How many splits of each row are done; null without splits. */
    u32* counters;
};
static_assert(sizeof(ArgmaxParams) == 120, "ArgmaxParams as in Rust");
static_assert(__builtin_offsetof(ArgmaxParams, extent) == 0, "ArgmaxParams as in Rust");
static_assert(__builtin_offsetof(ArgmaxParams, columns) == 72, "ArgmaxParams as in Rust");
static_assert(__builtin_offsetof(ArgmaxParams, x) == 80, "ArgmaxParams as in Rust");
static_assert(__builtin_offsetof(ArgmaxParams, ids) == 96, "ArgmaxParams as in Rust");
static_assert(__builtin_offsetof(ArgmaxParams, partial) == 104, "ArgmaxParams as in Rust");
static_assert(__builtin_offsetof(ArgmaxParams, counters) == 112, "ArgmaxParams as in Rust");
