/*
 * Parameters of the kernels in norm/norm.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `rms_norm` and `rms_norm_wide`. */
struct RmsNormParams {
    Extent extent;
    /* Elements of a group, which is normalised by itself. */
    i64 width;
    Matrix<const X> x;
    const WEIGHT* weight;
    Matrix<X> y;
    float eps;
    /* Added to every weight. */
    float weight_offset;
};
static_assert(sizeof(RmsNormParams) == 128, "RmsNormParams as in Rust");
static_assert(sizeof(RmsNormParams::extent) == 72 && alignof(decltype(RmsNormParams::extent)) == 8, "RmsNormParams as in Rust");
static_assert(sizeof(RmsNormParams::width) == 8 && alignof(decltype(RmsNormParams::width)) == 8, "RmsNormParams as in Rust");
static_assert(sizeof(RmsNormParams::x) == 16 && alignof(decltype(RmsNormParams::x)) == 8, "RmsNormParams as in Rust");
static_assert(sizeof(RmsNormParams::weight) == 8 && alignof(decltype(RmsNormParams::weight)) == 8, "RmsNormParams as in Rust");
static_assert(sizeof(RmsNormParams::y) == 16 && alignof(decltype(RmsNormParams::y)) == 8, "RmsNormParams as in Rust");
static_assert(sizeof(RmsNormParams::eps) == 4 && alignof(decltype(RmsNormParams::eps)) == 4, "RmsNormParams as in Rust");
static_assert(sizeof(RmsNormParams::weight_offset) == 4 && alignof(decltype(RmsNormParams::weight_offset)) == 4, "RmsNormParams as in Rust");

/* Parameters of `layer_norm` and `layer_norm_wide`. */
struct LayerNormParams {
    Extent extent;
    i64 width;
    Matrix<const X> x;
    /* May be null. */
    const WEIGHT* weight;
    /* May be null. */
    const BIAS* bias;
    Matrix<X> y;
    float eps;
};
static_assert(sizeof(LayerNormParams) == 136, "LayerNormParams as in Rust");
static_assert(sizeof(LayerNormParams::extent) == 72 && alignof(decltype(LayerNormParams::extent)) == 8, "LayerNormParams as in Rust");
static_assert(sizeof(LayerNormParams::width) == 8 && alignof(decltype(LayerNormParams::width)) == 8, "LayerNormParams as in Rust");
static_assert(sizeof(LayerNormParams::x) == 16 && alignof(decltype(LayerNormParams::x)) == 8, "LayerNormParams as in Rust");
static_assert(sizeof(LayerNormParams::weight) == 8 && alignof(decltype(LayerNormParams::weight)) == 8, "LayerNormParams as in Rust");
static_assert(sizeof(LayerNormParams::bias) == 8 && alignof(decltype(LayerNormParams::bias)) == 8, "LayerNormParams as in Rust");
static_assert(sizeof(LayerNormParams::y) == 16 && alignof(decltype(LayerNormParams::y)) == 8, "LayerNormParams as in Rust");
static_assert(sizeof(LayerNormParams::eps) == 4 && alignof(decltype(LayerNormParams::eps)) == 4, "LayerNormParams as in Rust");

/* Parameters of `add_rms_norm`. */
struct AddRmsNormParams {
    Extent extent;
    /* Elements of a group, which is normalised by itself. */
    i64 width;
    Matrix<const X> a;
    Matrix<const X> b;
    const WEIGHT* weight;
    /* The sum. */
    Matrix<X> r;
    Matrix<X> y;
    float alpha;
    float eps;
    /* Added to every weight. */
    float weight_offset;
};
static_assert(sizeof(AddRmsNormParams) == 168, "AddRmsNormParams as in Rust");
static_assert(sizeof(AddRmsNormParams::extent) == 72 && alignof(decltype(AddRmsNormParams::extent)) == 8, "AddRmsNormParams as in Rust");
static_assert(sizeof(AddRmsNormParams::width) == 8 && alignof(decltype(AddRmsNormParams::width)) == 8, "AddRmsNormParams as in Rust");
static_assert(sizeof(AddRmsNormParams::a) == 16 && alignof(decltype(AddRmsNormParams::a)) == 8, "AddRmsNormParams as in Rust");
static_assert(sizeof(AddRmsNormParams::b) == 16 && alignof(decltype(AddRmsNormParams::b)) == 8, "AddRmsNormParams as in Rust");
static_assert(sizeof(AddRmsNormParams::weight) == 8 && alignof(decltype(AddRmsNormParams::weight)) == 8, "AddRmsNormParams as in Rust");
static_assert(sizeof(AddRmsNormParams::r) == 16 && alignof(decltype(AddRmsNormParams::r)) == 8, "AddRmsNormParams as in Rust");
static_assert(sizeof(AddRmsNormParams::y) == 16 && alignof(decltype(AddRmsNormParams::y)) == 8, "AddRmsNormParams as in Rust");
static_assert(sizeof(AddRmsNormParams::alpha) == 4 && alignof(decltype(AddRmsNormParams::alpha)) == 4, "AddRmsNormParams as in Rust");
static_assert(sizeof(AddRmsNormParams::eps) == 4 && alignof(decltype(AddRmsNormParams::eps)) == 4, "AddRmsNormParams as in Rust");
static_assert(sizeof(AddRmsNormParams::weight_offset) == 4 && alignof(decltype(AddRmsNormParams::weight_offset)) == 4, "AddRmsNormParams as in Rust");
