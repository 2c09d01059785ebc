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
    /* The up operand, if it is a separate tensor; absent otherwise. */
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
    /* The upper limit of the gate and of the magnitude of up; 0 for none. */
    float limit;
};
static_assert(sizeof(QuantiseRowsParams) == 168, "QuantiseRowsParams as in Rust");
static_assert(sizeof(QuantiseRowsParams::extent) == 72 && alignof(decltype(QuantiseRowsParams::extent)) == 8, "QuantiseRowsParams as in Rust");
static_assert(sizeof(QuantiseRowsParams::columns) == 8 && alignof(decltype(QuantiseRowsParams::columns)) == 8, "QuantiseRowsParams as in Rust");
static_assert(sizeof(QuantiseRowsParams::x) == 16 && alignof(decltype(QuantiseRowsParams::x)) == 8, "QuantiseRowsParams as in Rust");
static_assert(sizeof(QuantiseRowsParams::up) == 16 && alignof(decltype(QuantiseRowsParams::up)) == 8, "QuantiseRowsParams as in Rust");
static_assert(sizeof(QuantiseRowsParams::weight) == 8 && alignof(decltype(QuantiseRowsParams::weight)) == 8, "QuantiseRowsParams as in Rust");
static_assert(sizeof(QuantiseRowsParams::bias) == 8 && alignof(decltype(QuantiseRowsParams::bias)) == 8, "QuantiseRowsParams as in Rust");
static_assert(sizeof(QuantiseRowsParams::y) == 16 && alignof(decltype(QuantiseRowsParams::y)) == 8, "QuantiseRowsParams as in Rust");
static_assert(sizeof(QuantiseRowsParams::scales) == 8 && alignof(decltype(QuantiseRowsParams::scales)) == 8, "QuantiseRowsParams as in Rust");
static_assert(sizeof(QuantiseRowsParams::eps) == 4 && alignof(decltype(QuantiseRowsParams::eps)) == 4, "QuantiseRowsParams as in Rust");
static_assert(sizeof(QuantiseRowsParams::weight_offset) == 4 && alignof(decltype(QuantiseRowsParams::weight_offset)) == 4, "QuantiseRowsParams as in Rust");
static_assert(sizeof(QuantiseRowsParams::limit) == 4 && alignof(decltype(QuantiseRowsParams::limit)) == 4, "QuantiseRowsParams as in Rust");
