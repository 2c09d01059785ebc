/*
 * Parameters of the kernels in elementwise/rope.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `rope`. */
struct RopeParams {
    Extent extent;
    Matrix<const X> x;
    Matrix<X> y;
    const int* positions;
    /* The angle of each pair at position 1. */
    const float* frequencies;
    i64 heads;
    /* Elements of a head. */
    i64 size;
    /* Rotated pairs of a head. */
    i64 pairs;
    float scale;
};
static_assert(sizeof(RopeParams) == 152, "RopeParams as in Rust");
static_assert(__builtin_offsetof(RopeParams, extent) == 0, "RopeParams as in Rust");
static_assert(__builtin_offsetof(RopeParams, x) == 72, "RopeParams as in Rust");
static_assert(__builtin_offsetof(RopeParams, y) == 88, "RopeParams as in Rust");
static_assert(__builtin_offsetof(RopeParams, positions) == 104, "RopeParams as in Rust");
static_assert(__builtin_offsetof(RopeParams, frequencies) == 112, "RopeParams as in Rust");
static_assert(__builtin_offsetof(RopeParams, heads) == 120, "RopeParams as in Rust");
static_assert(__builtin_offsetof(RopeParams, size) == 128, "RopeParams as in Rust");
static_assert(__builtin_offsetof(RopeParams, pairs) == 136, "RopeParams as in Rust");
static_assert(__builtin_offsetof(RopeParams, scale) == 144, "RopeParams as in Rust");
