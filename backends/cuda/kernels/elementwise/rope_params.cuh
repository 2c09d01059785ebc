/*
 * Parameters of the kernels in elementwise/rope.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `rope` and `rope_wide`. */
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
static_assert(sizeof(RopeParams::extent) == 72 && alignof(decltype(RopeParams::extent)) == 8, "RopeParams as in Rust");
static_assert(sizeof(RopeParams::x) == 16 && alignof(decltype(RopeParams::x)) == 8, "RopeParams as in Rust");
static_assert(sizeof(RopeParams::y) == 16 && alignof(decltype(RopeParams::y)) == 8, "RopeParams as in Rust");
static_assert(sizeof(RopeParams::positions) == 8 && alignof(decltype(RopeParams::positions)) == 8, "RopeParams as in Rust");
static_assert(sizeof(RopeParams::frequencies) == 8 && alignof(decltype(RopeParams::frequencies)) == 8, "RopeParams as in Rust");
static_assert(sizeof(RopeParams::heads) == 8 && alignof(decltype(RopeParams::heads)) == 8, "RopeParams as in Rust");
static_assert(sizeof(RopeParams::size) == 8 && alignof(decltype(RopeParams::size)) == 8, "RopeParams as in Rust");
static_assert(sizeof(RopeParams::pairs) == 8 && alignof(decltype(RopeParams::pairs)) == 8, "RopeParams as in Rust");
static_assert(sizeof(RopeParams::scale) == 4 && alignof(decltype(RopeParams::scale)) == 4, "RopeParams as in Rust");
