/*
 * Parameters of the kernels in quant/quant.cu.
 *
 * Generated from Rust by `cargo run -p dsrun-cuda --example kernel_headers`.
 */
/* Parameters of `quantise_rows`. */
struct QuantiseRowsParams {
    Extent extent;
    /* Columns of the result. */
    i64 columns;
    Matrix<const X> x;
    /* What the activated gate is multiplied by, where it is a tensor of its own; else absent. */
    Matrix<const X> up;
    /* Of the norm; may be null. */
    const WEIGHT* weight;
    /* Of the norm; may be null. */
    const BIAS* bias;
    Matrix<signed char> y;
    float* scales;
    float eps;
    /* Added to every weight. */
    float weight_offset;
    /* The largest gate and the largest magnitude of up; 0 for no limit. */
    float limit;
};
static_assert(sizeof(QuantiseRowsParams) == 168, "QuantiseRowsParams as in Rust");
static_assert(__builtin_offsetof(QuantiseRowsParams, extent) == 0, "QuantiseRowsParams as in Rust");
static_assert(__builtin_offsetof(QuantiseRowsParams, columns) == 72, "QuantiseRowsParams as in Rust");
static_assert(__builtin_offsetof(QuantiseRowsParams, x) == 80, "QuantiseRowsParams as in Rust");
static_assert(__builtin_offsetof(QuantiseRowsParams, up) == 96, "QuantiseRowsParams as in Rust");
static_assert(__builtin_offsetof(QuantiseRowsParams, weight) == 112, "QuantiseRowsParams as in Rust");
static_assert(__builtin_offsetof(QuantiseRowsParams, bias) == 120, "QuantiseRowsParams as in Rust");
static_assert(__builtin_offsetof(QuantiseRowsParams, y) == 128, "QuantiseRowsParams as in Rust");
static_assert(__builtin_offsetof(QuantiseRowsParams, scales) == 144, "QuantiseRowsParams as in Rust");
static_assert(__builtin_offsetof(QuantiseRowsParams, eps) == 152, "QuantiseRowsParams as in Rust");
static_assert(__builtin_offsetof(QuantiseRowsParams, weight_offset) == 156, "QuantiseRowsParams as in Rust");
static_assert(__builtin_offsetof(QuantiseRowsParams, limit) == 160, "QuantiseRowsParams as in Rust");
