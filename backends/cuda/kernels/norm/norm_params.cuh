/*
 * Parameters of the kernels in norm/norm.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `rms_norm` and `rms_norm_wide`. */
struct RmsNormParams {
    Extent extent;
    /* Elements of a group, which is normed by itself. */
    i64 width;
    Matrix<const X> x;
    const WEIGHT* weight;
    Matrix<X> y;
    float eps;
    /* Added to every weight. */
    float weight_offset;
};
static_assert(sizeof(RmsNormParams) == 128, "RmsNormParams as in Rust");
static_assert(__builtin_offsetof(RmsNormParams, extent) == 0, "RmsNormParams as in Rust");
static_assert(__builtin_offsetof(RmsNormParams, width) == 72, "RmsNormParams as in Rust");
static_assert(__builtin_offsetof(RmsNormParams, x) == 80, "RmsNormParams as in Rust");
static_assert(__builtin_offsetof(RmsNormParams, weight) == 96, "RmsNormParams as in Rust");
static_assert(__builtin_offsetof(RmsNormParams, y) == 104, "RmsNormParams as in Rust");
static_assert(__builtin_offsetof(RmsNormParams, eps) == 120, "RmsNormParams as in Rust");
static_assert(__builtin_offsetof(RmsNormParams, weight_offset) == 124, "RmsNormParams as in Rust");

/* Parameters of `layer_norm`. */
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
static_assert(__builtin_offsetof(LayerNormParams, extent) == 0, "LayerNormParams as in Rust");
static_assert(__builtin_offsetof(LayerNormParams, width) == 72, "LayerNormParams as in Rust");
static_assert(__builtin_offsetof(LayerNormParams, x) == 80, "LayerNormParams as in Rust");
static_assert(__builtin_offsetof(LayerNormParams, weight) == 96, "LayerNormParams as in Rust");
static_assert(__builtin_offsetof(LayerNormParams, bias) == 104, "LayerNormParams as in Rust");
static_assert(__builtin_offsetof(LayerNormParams, y) == 112, "LayerNormParams as in Rust");
static_assert(__builtin_offsetof(LayerNormParams, eps) == 128, "LayerNormParams as in Rust");

/* Parameters of `add_rms_norm`. */
struct AddRmsNormParams {
    Extent extent;
    /* Elements of a group, which is normed by itself. */
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
static_assert(__builtin_offsetof(AddRmsNormParams, extent) == 0, "AddRmsNormParams as in Rust");
static_assert(__builtin_offsetof(AddRmsNormParams, width) == 72, "AddRmsNormParams as in Rust");
static_assert(__builtin_offsetof(AddRmsNormParams, a) == 80, "AddRmsNormParams as in Rust");
static_assert(__builtin_offsetof(AddRmsNormParams, b) == 96, "AddRmsNormParams as in Rust");
static_assert(__builtin_offsetof(AddRmsNormParams, weight) == 112, "AddRmsNormParams as in Rust");
static_assert(__builtin_offsetof(AddRmsNormParams, r) == 120, "AddRmsNormParams as in Rust");
static_assert(__builtin_offsetof(AddRmsNormParams, y) == 136, "AddRmsNormParams as in Rust");
static_assert(__builtin_offsetof(AddRmsNormParams, alpha) == 152, "AddRmsNormParams as in Rust");
static_assert(__builtin_offsetof(AddRmsNormParams, eps) == 156, "AddRmsNormParams as in Rust");
static_assert(__builtin_offsetof(AddRmsNormParams, weight_offset) == 160, "AddRmsNormParams as in Rust");
